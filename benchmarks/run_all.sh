#!/usr/bin/env bash
# Every figure of docs/benchmarks.md, on an otherwise idle machine; about twenty minutes on two cores.
# PEERS: a folder for an environment with other engines, which is made if it is missing and then takes
# turns with quire; another half hour. GGUF_FILES: files for quire and llama.cpp. The front page's plot
# needs both.
set -euo pipefail
cd "$(dirname "$0")/.."
results=benchmarks/results
python=.venv/bin/python
quire=.venv/bin/quire

$quire bench throughput --dataset-name sharegpt --max-output-len 512 --num-prompts 128 --repeats 5 \
  --quiet --output-json $results/throughput_bundled_sharegpt.json
$quire bench throughput --dataset-name alpaca --num-prompts 256 --repeats 5 \
  --quiet --output-json $results/throughput_bundled_alpaca.json
$quire bench latency --batch-size 1 --input-len 32 --output-len 128 --num-iters 10 \
  --quiet --output-json $results/latency_bundled.json
$python benchmarks/front.py --output $results/front.json
$python benchmarks/serving.py --output $results/serving.json
$python benchmarks/serving.py --output $results/serving_1_thread.json -- --num-threads 1
$python benchmarks/scheduler.py --output $results/scheduler.json
$python benchmarks/kv_waste.py --output $results/kv_waste.json
$python benchmarks/block_sharing.py --output $results/block_sharing.json
$python benchmarks/speculation.py --quantization int8 --output $results/speculation.json
$python benchmarks/structured.py --output $results/structured.json
$python benchmarks/captured_rows.py --quantization int8 --turns 5 --output $results/captured_rows_qwen3.json
$python benchmarks/captured_rows.py --model benchmarks/models/llama-12m --turns 45 \
  --output $results/captured_rows_llama.json
$python benchmarks/step_tokens.py --turns 5 --output $results/step_tokens.json
$python benchmarks/beams.py --output $results/beams.json
$python benchmarks/threads_cpu.py --output $results/threads_cpu.json
$python benchmarks/attention_cpu.py --output $results/attention_cpu.json
$python benchmarks/draw_cpu.py --output $results/draw_cpu.json
for threads in 1 2; do
  $python benchmarks/linear_cpu.py --threads $threads --output $results/linear_cpu_threads_$threads.json
  $python benchmarks/linear_quantized_cpu.py --quick --threads $threads \
    --output $results/linear_quantized_cpu_threads_$threads.json
done
$python benchmarks/quantization_formats_cpu.py --output $results/quantization_formats_cpu.json
$python benchmarks/quantization_quality.py --output $results/quantization_quality.json
$python benchmarks/kv_cache_quality.py --max-bytes 2000 --output $results/kv_cache_quality.json
peers=()
if [[ -n "${PEERS:-}" ]]; then
  if [[ ! -x "$PEERS/bin/python" ]]; then
    python3 -m venv "$PEERS"
    "$PEERS/bin/pip" install openvino-genai optimum-intel gguf vllm
    # for this processor, not for any; docs/benchmarks.md says which flags a processor with AMX needs
    CMAKE_ARGS="${CMAKE_ARGS:--DGGML_NATIVE=ON}" "$PEERS/bin/pip" install --no-binary llama-cpp-python llama-cpp-python
  fi
  converted=$(mktemp -d)
  trap 'rm -r "$converted"' EXIT
  peers=(--engine quire openvino llama_cpp vllm --work-dir "$converted")
  for engine in openvino llama_cpp vllm; do peers+=(--python "$engine=$PEERS/bin/python"); done
  PATH="$PATH:$PEERS/bin" $python benchmarks/serving.py --server vllm --output $results/serving_vllm.json -- --enforce-eager
  if [[ -n "${GGUF_FILES:-}" ]]; then
    # shellcheck disable=SC2086  several files
    $python benchmarks/gguf_cpu.py $GGUF_FILES --llama-python "$PEERS/bin/python" --output $results/gguf_cpu.json
  fi
fi
$python benchmarks/cpu_limits.py --threads 2 --repeats 12 --output $results/cpu_limits.json
$python benchmarks/cpu_table.py "${peers[@]}" --output-folder $results/cpu_turns
$python benchmarks/cpu_mixed.py "${peers[@]}" --repeats 3 --output-folder $results/cpu_mixed
$python benchmarks/core_faults.py --output $results/core_faults.json
$python benchmarks/server_start.py --output $results/server_start.json
$python benchmarks/server_faults.py --output $results/server_faults.json
$python benchmarks/policies.py --output $results/policies.json
$python benchmarks/simulated_against_measured.py --output $results/simulated_against_measured.json
$python -m quire simulate --paper $results/paper
$python benchmarks/shared_prefix_simulated.py --output $results/shared_prefix_simulated.json
$python benchmarks/shared_prefix.py --output $results/shared_prefix.json
$python benchmarks/recovery.py --repeats 2 --output $results/recovery.json
$python benchmarks/soak.py --steps 1000000 --seed 100000 --output $results/soak.json
$python benchmarks/plots.py # needs quire[plots]
