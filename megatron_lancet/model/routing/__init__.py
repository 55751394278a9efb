"""How are tokens routed, and which rank holds an expert?"""
