"""A server that refuses connections until the file named by GO is there; then it serves a model called tiny."""

import http.server
import json
import os
import sys
import time


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps({"data": [{"id": "tiny"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


while not os.path.exists(os.environ["GO"]):
    time.sleep(0.02)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
