"""Who of the other processes is there, who is late, and who has come to a barrier."""
