# quire from Debian and PyPI alone: docker build -t quire .
FROM debian:trixie-slim AS build
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY src src
RUN python3 -m venv /opt/quire \
    && /opt/quire/bin/pip install --no-cache-dir .

FROM debian:trixie-slim
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 libgomp1 libstdc++6 ca-certificates \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home quire
COPY --from=build /opt/quire /opt/quire
USER quire
ENV PATH=/opt/quire/bin:$PATH
EXPOSE 8000
STOPSIGNAL SIGTERM
ENTRYPOINT ["quire"]
CMD ["serve"]
