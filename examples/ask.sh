#!/bin/sh
# Asks a running application about a picture file with curl, and prints the durations of its stages (Server-Timing).
#
#   sh examples/ask.sh picture.png "What is in the picture?" [http://127.0.0.1:8000]
set -eu

picture=$1
question=$2
url=${3:-http://127.0.0.1:8000}

# From stdin, because a picture may exceed the limit on a command line.
curl --silent --show-error --dump-header - "$url/v1/chat/completions" \
    --header 'Content-Type: application/json' --data-binary @- <<EOF
{"max_tokens": 64,
 "messages": [{"role": "user", "content": [
   {"type": "image_url", "image_url": {"url": "data:image/png;base64,$(base64 <"$picture" | tr -d '\n')"}},
   {"type": "text", "text": "$question"}]}]}
EOF
echo
