# On the GPU machine, in the repository's root, with the bundle's files in .gpu/:
#
#     source .gpu/on_device.sh; scripts/gpu_check.sh OUT
#
# Unpacks the packages once per bundle and adds them to PYTHONPATH; puts OPER's libraries that were
# carried along into the checkout, unless it has its own.
oper_archive=.gpu/gpu-site.tar.xz
oper_site=${TMPDIR:-/tmp}/oper-gpu-site-$(cksum <"$oper_archive" | tr ' ' -)
if [ ! -e "$oper_site/.whole" ]; then
  mkdir -p "$oper_site"
  # tar needs xz, which not every machine has.
  if tar -xJf "$oper_archive" -C "$oper_site" 2>/dev/null ||
    python3 -c "import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2])" \
      "$oper_archive" "$oper_site"; then
    touch "$oper_site/.whole"
  else
    echo "on_device.sh: $oper_archive is damaged: carry it again" >&2
  fi
fi
if [ -e "$oper_site/.whole" ]; then export PYTHONPATH=$oper_site${PYTHONPATH:+:$PYTHONPATH}; fi
for library in .gpu/_cuda.so .gpu/_C*.so; do
  if [ -e "$library" ]; then cp -n "$library" oper/; fi
done
