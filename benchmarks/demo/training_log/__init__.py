"""What a training of the demo prints, shown while it runs and drawn afterwards."""
