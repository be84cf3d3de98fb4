"""How processes begin and end: what was asked for, who they are, how they find each other."""
