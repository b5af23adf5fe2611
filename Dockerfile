# docker build -t megatron .
# docker run --gpus all --shm-size=2g -v "$PWD/data:/app/data" -v "$PWD/runs:/app/runs" megatron python deepy.py train.py configs/mep.yml
# torch brings its own CUDA libraries; the base image's job is to ask the driver for CUDA 13.
FROM nvidia/cuda:13.0.1-runtime-ubuntu24.04

# A C compiler and Python's headers: Triton builds its kernel launchers when they are first used.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc git libc6-dev python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home researcher && install -d -o researcher -g researcher /app /venv
USER researcher
WORKDIR /app

ENV PATH=/venv/bin:$PATH \
    PYTHONUNBUFFERED=1
COPY --chown=researcher requirements.txt constraints.txt ./
RUN python3 -m venv /venv && pip install --no-cache-dir -r requirements.txt -c constraints.txt

COPY --chown=researcher . .
RUN pip install --no-cache-dir --no-deps --no-build-isolation -e .
CMD ["python", "deepy.py", "--help"]
