"""Environment of collective communication: what each node's hardware asks for, decided once for the whole job."""
