"""What makes a run larger: several hosts, replay shards and actors in processes of their own."""
