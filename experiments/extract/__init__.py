"""Raw data to embeddings: datasets through encoders to files, and search among them."""
