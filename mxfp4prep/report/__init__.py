"""What the verbs found, as text for people and as JSON for programs."""
