"""How unevenly are experts loaded, and where should each be?"""
