"""The wire contract of attnd: messages, service descriptors, and arrays as messages.

The `*_pb2` modules are generated from the `.proto` files beside them by `make generate`. Services are read from the
descriptors (`attention_pb2.DESCRIPTOR.services_by_name`), so there are no generated stubs.
"""
