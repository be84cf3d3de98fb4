"""Messages between ranks that share memory: letters about what is lent, which the others look into."""
