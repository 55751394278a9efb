"""Documents as samples, dealt to bins over all data-parallel ranks: from the data set to the batches of a step."""
