"""What theory guarantees about unseen data, and whether it says anything."""
