from tests.workers.fixtures import (  # noqa: F401  # fixtures of this folder
    database_url,
    main_url,
    make_lab,
    pgbouncer,
    private_server,
    private_servers,
    server_url,
)
