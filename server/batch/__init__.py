"""`pointsman batch`: a file of requests in OpenAI's batch format, answered offline by the same application, no port."""
