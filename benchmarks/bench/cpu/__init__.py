"""CPU: tables that are measured on the host."""
