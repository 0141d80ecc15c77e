"""The chapters: clauses by subject, each file one noun."""
