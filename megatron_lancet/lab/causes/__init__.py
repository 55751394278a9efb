"""Why did ranks wait for messages in a traced step?"""
