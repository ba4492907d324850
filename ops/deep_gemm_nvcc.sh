#!/bin/sh
# Stands between DeepGEMM and nvcc (ops/deep_gemm_nvcc.py). Where the process that compiles is sealed,
# a compile is refused, or noted once it is done: a copy of its source, and a byte that the process
# looks at after each call.
#   COMPILE_EXT_NVCC       the compiler itself
#   COMPILE_EXT_NVCC_SEAL  <process>:<folder of the notes>, set while that process is sealed

owner=${COMPILE_EXT_NVCC_SEAL%%:*}
folder=${COMPILE_EXT_NVCC_SEAL#*:}

# Not a process that the sealed one has started: the compiler's parent is it, or a shell of it.
is_sealed() {
    [ -n "$owner" ] || return 1
    [ "$PPID" != "$owner" ] || return 0
    read -r _ _ _ grandparent _ <"/proc/$PPID/stat" && [ "$grandparent" = "$owner" ]
}

note() {
    cp "$source" "$folder/$$.tmp" && mv "$folder/$$.tmp" "$folder/$$.cu"
    printf 1 1<>"$folder/noted"
}

source=
for argument in "$@"; do
    case $argument in
    *.cu) source=$argument ;;
    esac
done

if [ -z "$source" ] || ! is_sealed; then
    exec "$COMPILE_EXT_NVCC" "$@"
fi
if [ -e "$folder/refuse" ]; then
    note
    echo "compile_ext.seal refuses to compile" >&2
    exit 1
fi
"$COMPILE_EXT_NVCC" "$@"
status=$?
note
exit $status
