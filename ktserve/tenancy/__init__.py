"""Who a request belongs to: namespaces, their encoding, tenants and their keys."""
