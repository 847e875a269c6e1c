# On the GPU machine, in the repository's root, with the bundle's files in .gpu/:
#
#     source .gpu/on_device.sh; scripts/gpu_check.sh OUT
#
# Unpacks the packages once and adds them to PYTHONPATH; puts OPER's libraries that were carried
# along into the checkout, unless it has its own.
oper_site=${TMPDIR:-/tmp}/oper-gpu-site
if [ ! -e "$oper_site/.whole" ]; then
  mkdir -p "$oper_site"
  tar -xJf .gpu/gpu-site.tar.xz -C "$oper_site" 2>/dev/null ||
    python3 -c "import sys, tarfile; tarfile.open('.gpu/gpu-site.tar.xz').extractall(sys.argv[1])" "$oper_site"
  touch "$oper_site/.whole"
fi
export PYTHONPATH=$oper_site${PYTHONPATH:+:$PYTHONPATH}
for library in .gpu/_cuda.so .gpu/_C*.so; do
  if [ -e "$library" ]; then cp -n "$library" oper/; fi
done
