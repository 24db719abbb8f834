"""The active requests of a gateway: those whose token logs it reads for its clients.

A request is active from ACCEPT (or from the first reader that resumes it) to its end or its last reader.
"""
