//! What bad input gets: exit code 2, one line that names the value and what is accepted, before
//! anything starts.

use std::process::{Command, Output};

fn run_tenmil(arguments: &[&str]) -> Output {
    let program = env!("CARGO_BIN_EXE_tenmil");
    Command::new(program).args(arguments).output().expect("the program of this package starts")
}

/// What is written to standard error, where the exit code is 2 and nothing else is written.
fn error_line(line: &str) -> String {
    let arguments: Vec<&str> = line.split_whitespace().collect();
    let output = run_tenmil(&arguments);
    assert_eq!(output.status.code(), Some(2), "{line}");
    assert_eq!(output.stdout, b"", "{line}");
    let text = String::from_utf8(output.stderr).expect("text");
    let text = text.strip_suffix('\n').expect("a whole line").to_owned();
    assert!(!text.contains('\n'), "more than a line for `{line}`:\n{text}");
    text.strip_prefix("error: ").expect("an error says that it is one").to_owned()
}

const KINDS: &str =
    "expected emu:null, emu:ram, emu:file:PATH, emu:model:p4600 or emu:model:p4800x";

#[test]
fn malformed_uri_and_unknown_device_are_rejected() {
    for (line, expected) in [
        (
            "perf null",
            "null: no such file or directory, expected KIND:… such as ram:1g, or the path of a file \
             or block device; a new file is `file:null?size=1g`"
                .into(),
        ),
        (
            "perf 5e:00.0",
            "5e:00.0: no devices of kind `5e`, expected one of null:, ram:, file:, model:, \
             delay:, fault:, split:, stripe:, mirror:, volume:, emu:, tcp:, vfio-user:, pcie:, rbd:, \
             crypt:; an SSD on the PCI bus is `pcie:5e:00.0`"
                .into(),
        ),
        (
            "perf nvme:1",
            "nvme:1: no devices of kind `nvme`, expected one of null:, ram:, file:, model:, \
             delay:, fault:, split:, stripe:, mirror:, volume:, emu:, tcp:, vfio-user:, pcie:, rbd:, \
             crypt:; a file is `file:nvme:1`"
                .into(),
        ),
        ("perf emu:tape", format!("emu:tape: no medium `tape`, {KINDS}")),
        ("perf emu:model:x", "emu:model:x: no model `x`, expected p4600 or p4800x".into()),
        (
            "perf emu:null?count=none",
            "emu:null?count=none: count is `none`, expected 1 to 256".into(),
        ),
        ("identify emu:null?count=2", "emu:null?count=2: 2 SSDs are named, expected one".into()),
    ] {
        assert_eq!(error_line(line), expected, "{line}");
    }
}

#[test]
fn option_without_effect_on_the_transport_is_rejected() {
    let nbd = "serve ram:1m -l nbd://127.0.0.1:0";
    let tcp = "serve ram:1m -l tcp://127.0.0.1:0";
    let vfio_user = "serve ram:1m -l vfio-user:/nowhere/disk";
    for (line, expected) in [
        (
            format!("{nbd} --nqn nqn.2024-01.example:disk"),
            "serve over NBD: --nqn is given, expected only with a listener for NVMe/TCP",
        ),
        (
            format!("{nbd} --buffer-memory 64m"),
            "serve over NBD: --buffer-memory is given, expected only with a listener for NVMe/TCP",
        ),
        (
            format!("{nbd} --socket engine=io_uring"),
            "serve over NBD: --socket is given, expected only with a listener for NVMe/TCP",
        ),
        (
            format!("{tcp} --export-name disk"),
            "serve over NVMe/TCP: --export-name is given, expected only with a listener for NBD",
        ),
        (
            format!("{tcp} --allow-resize"),
            "serve over NVMe/TCP: --allow-resize is given, expected only with a listener for NBD",
        ),
        (
            format!("{vfio_user} --allowed-host nqn.2024-01.example:client"),
            "serve over vfio-user: --allowed-host is given, expected only with a listener for NVMe/TCP",
        ),
        (
            format!("{vfio_user} --max-connections 3"),
            "serve over vfio-user: --max-connections is given, expected only with a listener for NBD \
             or NVMe/TCP",
        ),
        (
            format!("{vfio_user} --connections-per-address 3"),
            "serve over vfio-user: --connections-per-address is given, expected only with a listener \
             for NBD or NVMe/TCP",
        ),
        (
            format!("{nbd} --connections-per-host 3"),
            "serve over NBD: --connections-per-host is given, expected only with a listener for \
             NVMe/TCP",
        ),
        (
            format!("{tcp} --nbd-idle-timeout 15m"),
            "serve over NVMe/TCP: --nbd-idle-timeout is given, expected only with a listener for NBD",
        ),
        (
            format!("{tcp} --allow-remote-write"),
            "serve over NVMe/TCP: --allow-remote-write is given, expected only with a listener for NBD",
        ),
        (
            "serve --config /nowhere/target.toml --allow-any-host".into(),
            "--config and --allow-any-host are both given, expected one of them",
        ),
        (
            "serve --config /nowhere/target.toml --connections-per-address 3".into(),
            "--config and --connections-per-address are both given, expected one of them",
        ),
        (
            "serve --config /nowhere/target.toml --connections-per-host 3".into(),
            "--config and --connections-per-host are both given, expected one of them",
        ),
        (
            "serve --config /nowhere/target.toml --nbd-idle-timeout 90".into(),
            "--config and --nbd-idle-timeout are both given, expected one of them",
        ),
    ] {
        assert_eq!(error_line(&line), expected, "{line}");
    }
}

#[test]
fn impossible_number_is_rejected() {
    for (line, expected) in [
        ("perf -q 0", "-q 0: depth is 0, expected at least 1"),
        (
            "perf -q 5000",
            "-q 5000: depth is 5000, expected 1 to 1023, which emu:null?count=21 allows",
        ),
        (
            "perf --depth deep",
            "-q: `deep` is not a count, expected a whole number such as 1000, 500k or 2M",
        ),
        ("perf -q 99999999999", "-q: `99999999999` is too large, expected at most 4294967295"),
        (
            "perf -o 4095",
            "-o 4095: size is 4095 bytes, expected a multiple of the 512-byte blocks of \
             emu:null?count=21",
        ),
        (
            "perf emu:ram?block=4k -o 512",
            "-o 512: size is 512 bytes, expected a multiple of the 4096-byte blocks of \
             emu:ram?block=4k",
        ),
        (
            "perf -o 4q",
            "-o: `4q` is not a size, expected a size in bytes such as 4096, 4k, 64KiB or 1m",
        ),
        (
            "perf --bssplit 4k:x",
            "--bssplit: weight `x` in `4k:x`, expected 1 to 1000000, as in 4k:70,64k:30",
        ),
        (
            "serve ram:1m -l nbd:/nowhere/s --nbd-idle-timeout 0s",
            "--nbd-idle-timeout: `0s` is not a time, expected at least a second, such as 90s, 15m or 2h",
        ),
        (
            "serve ram:1m -l nbd:/nowhere/s --connections-per-address 0",
            "--connections-per-address: `0` is none, expected at least 1",
        ),
        (
            "serve ram:1m -l tcp://127.0.0.1:0 --connections-per-host 0",
            "--connections-per-host: `0` is none, expected at least 1",
        ),
        ("perf -M 101", "-M: read share is `101`, expected 0 to 100"),
        (
            "perf -t soon",
            "-t: `soon` is not a time, expected seconds such as 10 or 0.5, or 80us, 500ms or 2m",
        ),
        ("perf -t 0", "-t 0: no time to measure in, expected more than 0"),
        ("perf -d 0", "-d 0: no I/Os to do, expected at least 1"),
        ("perf --zipf -1", "--zipf -1: expected more than 0 and at most 5"),
        ("perf --zipf x", "--zipf: `x` is not a number, expected one such as 0.99"),
        ("perf --rate 0", "--rate 0: expected 1 to 1000000000 I/Os per second"),
        (
            "perf -P 70",
            "-P 70: 70 queue pairs over all submitting threads, expected at most 64, which \
             emu:null?count=21 allows",
        ),
        (
            "perf --verify",
            "--verify: emu:null?count=21 keeps no data, expected a medium that does, such as \
             emu:ram",
        ),
    ] {
        assert_eq!(error_line(line), expected, "{line}");
    }
}

#[test]
fn nonexistent_core_is_rejected() {
    let text = error_line("perf -c 1023");
    let start = "-c 1023: core 1023 does not exist or is not ours, expected some of ";
    assert!(text.starts_with(start), "{text}");
    let text = error_line("perf -c 1-0");
    assert!(text.starts_with("-c: cores '1-0': expected a list such as 0,2-3 or a mask"), "{text}");
}

#[test]
fn unwritable_report_file_is_rejected_before_the_run() {
    assert_eq!(
        error_line("perf --html /nowhere/report.html"),
        "--html /nowhere/report.html: no such file or directory, expected a file that can be written"
    );
    assert_eq!(
        error_line("perf --json=/"),
        "--json /: is a directory, expected a file that can be written"
    );
}

#[test]
fn unknown_word_is_rejected_with_the_known_ones() {
    for (line, expected) in [
        (
            "",
            "no command is given, expected perf, reproduce, list, bind, unbind, doctor, identify, discover, timeouts, copy, serve, proxy, get, set, events, iostat, mirror, pool, volume, key, support-bundle, top, completions, man, config, apply, reload, subsystem, namespace, host, listener, export or group",
        ),
        (
            "prf",
            "no command `prf`, expected perf, reproduce, list, bind, unbind, doctor, identify, discover, timeouts, copy, serve, proxy, get, set, events, iostat, mirror, pool, volume, key, support-bundle, top, completions, man, config, apply, reload, subsystem, namespace, host, listener, export or group",
        ),
        (
            "perf -w backwards",
            "-w backwards: expected read, write, randread, randwrite, rw, randrw, trim or flush-mix",
        ),
        (
            "mirror help --help",
            "no command `--help`, expected create, show, add, replace, remove or takeover",
        ),
        ("mirror foo", "no command `foo`, expected create, show, add, replace, remove or takeover"),
        ("perf --cq-doorbell never", "--cq-doorbell never: expected each, poll or deferred"),
        (
            "perf --command-store fast",
            "--command-store fast: expected auto, plain, sse2 or movdir64b",
        ),
        (
            "perf --command-store avx512",
            "--command-store avx512 was removed: AVX-512 stores reached 0.71 of the IOPS of plain \
             stores, expected auto, plain, sse2 or movdir64b",
        ),
        (
            "perf --completion-copy line",
            "`--completion-copy` was removed: copying completions by the cache line reached 0.87 of \
             the default's IOPS, expected it to be left out",
        ),
        (
            "perf --prefetch=ring",
            "`--prefetch` was removed: prefetching reached 0.67 to 0.91 of the default's IOPS, \
             expected it to be left out",
        ),
        ("perf --dept 4", "no flag `--dept`, expected perhaps `--depth`"),
        ("perf -z", "no flag `-z`, expected one of those shown by --help"),
        ("list x", "no argument `x`, expected one of those shown by --help"),
        ("perf -q", "-q: the value is missing, expected one after it"),
        ("perf -q 1 -q 2", "-q is given twice, expected once"),
        ("perf -o 4k --bssplit 4k:1", "-o and --bssplit are both given, expected one of them"),
        ("identify", "<URI> is missing, expected as shown by --help"),
        ("perf --arrivals uniform", "--rate <IOPS> is missing, expected as shown by --help"),
    ] {
        assert_eq!(error_line(line), expected, "{line}");
    }
}

#[test]
fn help_and_version_are_no_errors() {
    for arguments in
        [&["--help"][..], &["help", "perf"], &["perf", "--help"], &["perf", "-h"], &["--version"]]
    {
        let output = run_tenmil(arguments);
        assert_eq!(output.status.code(), Some(0), "{arguments:?}");
        assert_eq!(output.stderr, b"", "{arguments:?}");
        assert!(!output.stdout.is_empty(), "{arguments:?}");
    }
    let help = String::from_utf8(run_tenmil(&["perf", "--help"]).stdout).expect("text");
    for flag in [
        "-q",
        "-o",
        "-w",
        "-M",
        "-t",
        "-a",
        "-c",
        "-P",
        "-d",
        "--rate",
        "--bssplit",
        "--zipf",
        "--verify",
        "--json",
        "--html",
        "--baseline",
        "--no-doorbell-batching",
        "--cq-doorbell",
        "--command-store",
        "--shadow-doorbells",
        "--no-huge-pages",
        "release-no-lto",
    ] {
        assert!(help.contains(flag), "{flag} is not in the help");
    }
}

#[test]
fn emulated_ssds_are_listed_as_text_and_json() {
    let text = String::from_utf8(run_tenmil(&["list"]).stdout).expect("text");
    assert!(text.contains("emu:model:p4800x"), "{text}");
    let json = run_tenmil(&["list", "--json"]).stdout;
    let json: serde_json::Value = serde_json::from_slice(&json).expect("JSON");
    assert_eq!(json["emulated"][0]["uri"], "emu:null");
    assert!(json["pci"].is_array());
}
