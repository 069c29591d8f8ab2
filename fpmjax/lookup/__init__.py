"""How a number is found in a cell: the rule compiled on the host, gathered on the device."""
