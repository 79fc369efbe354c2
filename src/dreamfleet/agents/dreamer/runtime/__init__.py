"""What makes the algorithm run: devices, compiled programs, publishing, saving, reports."""
