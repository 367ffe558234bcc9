"""The chat page, as its bytes and headers."""

import base64
import hashlib
import re
import urllib.request


def test_the_page_runs_its_own_script_alone_and_asks_no_other_host(served):
    with urllib.request.urlopen(f"{served.url}/chat") as answer:
        text = answer.read().decode()
        policy = answer.headers["Content-Security-Policy"]
    assert answer.headers.get_content_type() == "text/html"
    (script,) = re.findall("<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert not re.findall(r"""(?:src|href)=|https?:|\son\w+=""", text)
