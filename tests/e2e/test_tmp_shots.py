import time
import pytest
from tests.e2e import disks
pytestmark = pytest.mark.browser
L="1.96,1.96,old-box,1,1387339401,4G,,,,374271,39,214541,19,,,392015,17,+++++,+++,,,,,,,,,,,,,,,,,,,167ms,89125us,,52047us,4766us,,,,,,"
def test_shots(admin_tab, rest, shared_folder):
    pool = disks.registered(rest, shared_folder)
    ids=[]
    for kind, options in (("cluster_size", {"size_bytes": 32<<20, "repetitions": 3}), ("cluster_size", {"size_bytes": 32<<20, "repetitions": 3}), ("fio", {"size_bytes": 32<<20, "repetitions": 2, "seconds": 1}),("dd", {"size_bytes": 64<<20}),("bonnie", {"size_bytes": 256<<20, "repetitions": 1}),("formats", {"size_bytes": 16<<20, "repetitions": 2})):
        run = rest.post("benchmarks/", {"kind": kind, "pool": pool["id"], "options": options})
        ids.append(run["id"])
        print(kind, rest.finished({"id": run["job"]}, 300)["state"])
    ids.append(rest.post("benchmarks/paste/", {"text": L}, expect=201)["id"])
    rest.post("benchmark-watches/", {"pool": pool["id"], "kind": "fio", "every_hours": 24}, expect=201)
    p=pool["id"]
    pages={"list":"/benchmarks/","cluster":f"/benchmarks/{ids[0]}/","fio":f"/benchmarks/{ids[2]}/","dd":f"/benchmarks/{ids[3]}/","bonnie":f"/benchmarks/{ids[4]}/","formats":f"/benchmarks/{ids[5]}/","pasted":f"/benchmarks/{ids[6]}/","compare":f"/benchmarks/compare/?ids={ids[0]},{ids[1]}","compareb":f"/benchmarks/compare/?ids={ids[4]},{ids[6]}","history":f"/benchmarks/pools/{p}/?profile=x","start":f"/benchmarks/start/?pool={p}&kind=fio","startboot":f"/benchmarks/start/?pool={p}&kind=boot","paste":"/benchmarks/paste/"}
    for theme in ("light","dark"):
        seen=admin_tab(theme)
        for n,a in pages.items():
            seen.open(a); seen.page.wait_for_load_state("networkidle")
            if n=="history": seen.page.get_by_role("link", name="cluster size, quick").click(); seen.page.wait_for_load_state("networkidle")
            if theme=="light" or n in ("cluster","start","history","fio"):
                seen.page.screenshot(path=f"/tmp/shots/{n}-{theme}.png", full_page=True)
            f=seen.faults_of_accessibility()
            w=seen.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            if f or not w: print(theme,n,w,f)
        print(seen.complaints)
