"""The dashboard: a server on loopback that follows run directories."""
