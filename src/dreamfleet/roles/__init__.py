"""What the workers of a fleet do: one file for each role.

Roles talk over `dreamfleet.transport` and never know what started them; what they share with
their parent is in `runtime`. None of them imports JAX; an agent that needs it brings it along.
"""
