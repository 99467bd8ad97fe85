"""The parts of the HTML page: each a pure function of the audit's JSON document."""
