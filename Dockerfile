# An image for `lockstep launch --kubernetes`: lockstep and its templates, no compiler, not root.
#
#     docker build -t registry.example/team/train:1 .
#     docker build --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 -t registry.example/team/train:1 .
#
# Your task goes into an image on top: FROM registry.example/team/train:1, then COPY task.py .
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS build
ARG TORCH=2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=hf
WORKDIR /source
RUN python -m venv /opt/lockstep
ENV PATH=/opt/lockstep/bin:$PATH
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX" "torch==$TORCH"
COPY pyproject.toml constraints.txt setup.py README.md LICENSE ./
COPY src ./src
RUN pip install --no-cache-dir -c constraints.txt ".[$EXTRAS]" \
    && lockstep init /tmp/first

FROM python:${PYTHON}-slim
# The user's group is the manifest's fsGroup, so that it may write to the volumes.
RUN useradd --create-home --uid 1000 lockstep
COPY --from=build /opt/lockstep /opt/lockstep
ENV PATH=/opt/lockstep/bin:$PATH PYTHONUNBUFFERED=1
USER 1000
WORKDIR /home/lockstep
ENTRYPOINT ["lockstep"]
CMD ["--help"]
