//! `tenmil serve`, and what stock NBD clients make of it: qemu-img, qemu-io, nbdinfo, nbdcopy, fio.
//!
//! A test whose tool is missing says so and is skipped, unless `TENMIL_REQUIRE_TOOLS` is set.
//! Everything has a limit of time.

use std::io::Read;
use std::net::TcpListener;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Command, Stdio};

use crate::served::{ServeProcess, are_tools_installed, run};
use serde_json::Value;

const MIB: usize = 1 << 20;

/// Bytes that repeat nowhere near, with a hole in the middle.
fn write_pattern(path: &Path, len: usize) {
    let mut bytes: Vec<u8> = (0..len / 8)
        .flat_map(|word| (word as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes())
        .collect();
    bytes[len / 4..len / 2].fill(0);
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn server_reports_its_address_and_stops_in_order() {
    let served = ServeProcess::start("ram:1m", &["--listen", "nbd://127.0.0.1:0"]);
    let words: Vec<&str> = served.ready.split_whitespace().collect();
    assert_eq!(words.len(), 3, "{}", served.ready);
    assert_eq!(
        (words[0], words[1]),
        ("ready", format!("nbd:{}", served.socket.display()).as_str())
    );
    let port = words[2].strip_prefix("nbd://127.0.0.1:").unwrap();
    assert_ne!(port.parse::<u16>().unwrap(), 0);
    let _guest = UnixStream::connect(&served.socket).unwrap();
    let socket = served.socket.clone();
    assert_eq!(served.stop_with_sigterm(), Some(0), "with a guest who says nothing");
    assert!(!socket.exists());
}

#[test]
fn ready_message_has_the_uri_as_json() {
    let served = ServeProcess::start("ram:1m", &["--json", "--read-only", "--export-name", "disk"]);
    let ready: Value = serde_json::from_str(&served.ready).unwrap();
    assert_eq!(ready["ready"], true);
    assert_eq!(ready["connect"][0], served.uri());
    assert_eq!((&ready["size_bytes"], &ready["name"]), (&(1 << 20).into(), &"disk".into()));
    assert_eq!(ready["read_only"], true);
}

#[test]
fn stale_socket_is_replaced_and_a_live_one_is_not() {
    let served = ServeProcess::start("ram:1m", &[]);
    let listen = format!("nbd:{}", served.socket.display());
    let second = Command::new(env!("CARGO_BIN_EXE_tenmil"))
        .args(["serve", "ram:1m", "--listen", &listen])
        .output()
        .unwrap();
    assert_eq!(second.status.code(), Some(2));
    let text = String::from_utf8(second.stderr).unwrap();
    assert!(text.contains("the address is in use"), "{text}");
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("dead");
    drop(UnixListener::bind(&socket).unwrap());
    let next = ServeProcess::start_at(&socket, "ram:1m", &[]);
    assert_eq!(next.stop_with_sigterm(), Some(0));
}

#[test]
fn invalid_serve_arguments_are_rejected_by_name() {
    let directory = tempfile::tempdir().unwrap();
    for (line, expected) in [
        ("serve ram:1m", "--listen"),
        ("serve ram:1m --listen udp://x", "`udp://x` is no address to listen at, expected nbd:"),
        ("serve tape: --listen nbd:x", "no devices of kind `tape`"),
        ("serve ram:1m --listen nbd:/no/such/place", "listen at /no/such/place: "),
        ("serve ram:1m --listen nbd:. --read-only", "a file lies there that is no socket"),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tenmil"));
        let output = command.args(line.split(' ')).current_dir(&directory).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{line}");
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(text.contains(expected), "{line}: {text}");
    }
}

#[test]
fn writable_export_beyond_loopback_requires_permission() {
    // There is no such file, so none of these serves anything.
    let directory = tempfile::tempdir().unwrap();
    let refusal = |more: &str| {
        let line = format!("serve file:/no/such/file --listen nbd:x {more}");
        let mut command = Command::new(env!("CARGO_BIN_EXE_tenmil"));
        let command = command.args(line.trim().split(' ')).current_dir(&directory);
        let output = command.output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{line}");
        String::from_utf8(output.stderr).unwrap()
    };
    for (beyond, expected) in [("0.0.0.0:0", "0.0.0.0:0"), ("[::]:0", "[::]:0")] {
        let listen = format!("--listen nbd://{beyond}");
        let text = refusal(&listen);
        let begin = format!("error: listen at nbd://{expected}: other machines could write there");
        assert!(text.starts_with(&begin) && text.contains("--allow-remote-write"), "{text}");
        for consent in ["--read-only", "--allow-remote-write"] {
            let text = refusal(&format!("{listen} {consent}"));
            assert!(text.contains("open /no/such/file: "), "{text}");
        }
    }
    for near in ["127.0.0.1:0", "[::1]:0"] {
        let text = refusal(&format!("--listen nbd://{near}"));
        assert!(text.contains("open /no/such/file: "), "{text}");
    }
}

#[test]
fn stuck_device_does_not_prevent_process_exit() {
    // A target that takes the connection and answers nothing.
    let target = TcpListener::bind("127.0.0.1:0").unwrap();
    let uri =
        format!("tcp://{}/nqn.2024-01.example:x?connect-timeout=60s", target.local_addr().unwrap());
    let child = Command::new(env!("CARGO_BIN_EXE_tenmil"))
        .args(["serve", &uri, "--listen", "nbd://127.0.0.1:0"])
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let pid = child.id();
    let _connection = target.accept().unwrap();
    // A service manager gives it five seconds; it is killed after ten.
    let last = format!(
        "kill -TERM {pid}; for _ in $(seq 100); do kill -0 {pid} 2>&- || exit 0; sleep 0.1; done; \
         kill -KILL {pid}"
    );
    let mut last = Command::new("sh").args(["-c", &last]).spawn().unwrap();
    let output = child.wait_with_output().unwrap();
    last.wait().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(3), "{text}");
    let expected = format!("error: stop: {uri}: a device has not completed its requests 4.8 s");
    assert!(text.starts_with(&expected), "{text}");
}

#[test]
fn serving_process_answers_rpc_queries() {
    let served = ServeProcess::start("ram:1m", &[]);
    let asked = served.stdout_of_rpc_command("get reactors --json");
    let reactors: Value = serde_json::from_str(&asked).unwrap();
    assert!(reactors.to_string().contains("adaptive"), "{reactors}");
}

#[test]
fn exports_and_connections_are_listed_and_changed() {
    let served = ServeProcess::start("ram:1m", &["--export-name", "disk", "--limit-iops", "5000"]);
    let asked =
        |line: &str| serde_json::from_str::<Value>(&served.stdout_of_rpc_command(line)).unwrap();
    let export = &asked("get exports --json")[0];
    assert_eq!((&export["name"], &export["uri"]), (&"disk".into(), &"ram:1m".into()));
    assert_eq!((&export["limit_iops"], &export["connections"]), (&5000.into(), &0.into()));
    let changed = asked("set export_limits iops=0 read_bytes=4096 --json");
    let (object, saved) = (&changed["object"], &changed["saved_to"]);
    assert_eq!((&object["iops"], &object["read_bytes"]), (&Value::Null, &4096.into()));
    assert_eq!(saved, &Value::Null, "in memory");
    let export = &asked("get exports --json")[0];
    assert_eq!((&export["limit_iops"], &export["read_limit_bytes"]), (&Value::Null, &4096.into()));
    let listen = format!("nbd:{}", served.socket.display());
    let created = asked(&format!("export create second ram:2m {listen} --json"));
    assert_eq!(created["object"]["name"], "second");
    assert_eq!(asked("get exports --json").as_array().unwrap().len(), 2);
    asked("export delete second --json");
    let mut guest = UnixStream::connect(&served.socket).unwrap();
    // It is there once it was greeted.
    guest.read_exact(&mut [0; 18]).unwrap();
    let connection = &asked("get connections --json")[0];
    assert_eq!(
        (&connection["export"], &connection["phase"]),
        (&"disk".into(), &"handshake".into())
    );
    asked("set connection id=0 disconnect=true --json");
    assert_eq!(guest.read(&mut [0; 1]).unwrap(), 0, "it is sent away");
    asked("set export remove=true --json");
    let late = UnixStream::connect(&served.socket).unwrap().read(&mut [0; 1]).unwrap();
    assert_eq!(late, 0, "a connection to a removed export is closed");
    assert_eq!(served.stop_with_sigterm(), Some(0));
}

#[test]
fn qemu_img_copies_to_and_from_the_export() {
    if !are_tools_installed(&["qemu-img"]) {
        return;
    }
    for more in [&[][..], &["--poll", "hybrid"]] {
        let directory = tempfile::tempdir().unwrap();
        let [disk, source, back] =
            ["disk", "source", "back"].map(|name| directory.path().join(name));
        write_pattern(&source, 16 * MIB);
        let served = ServeProcess::start(&format!("file:{}?size=16m", disk.display()), more);
        let uri = served.uri();
        let (source, back) = (source.to_str().unwrap(), back.to_str().unwrap());
        run("qemu-img", &["convert", "-n", "-f", "raw", "-O", "raw", source, &uri]);
        run("qemu-img", &["compare", "-f", "raw", "-F", "raw", source, &uri]);
        run("qemu-img", &["convert", "-f", "raw", "-O", "raw", &uri, back]);
        assert_eq!(served.stop_with_sigterm(), Some(0));
        let written = std::fs::read(&disk).unwrap();
        assert!(
            written == std::fs::read(source).unwrap() && written == std::fs::read(back).unwrap()
        );
    }
}

#[test]
fn qemu_io_verifies_every_operation() {
    if !are_tools_installed(&["qemu-io"]) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let disk = directory.path().join("disk");
    for uri in [format!("file:{}?size=64m", disk.display()), "ram:64m?block=4k".into()] {
        let served = ServeProcess::start(&uri, &[]);
        let commands = [
            "write -P 0x5a 0 1M",
            "read -P 0x5a 0 1M",
            "flush",
            "write -f -P 7 4k 8k",
            "read -P 7 4k 8k",
            "read -P 0x5a 12k 500k",
            "discard 64k 64k",
            "write -P 1 1M 2M",
            "write -z 1M 1M",
            "read -P 0 1M 1M",
            "read -P 1 2M 1M",
            "write -z -u 2M 512k",
            "read -P 0 2M 512k",
            "write -P 9 16M 32M",
            "read -P 9 16M 32M",
            "aio_write -P 3 0 64k",
            "aio_write -P 4 64k 64k",
            "aio_flush",
            "read -P 3 0 64k",
            "read -P 4 64k 64k",
        ];
        let uri = served.uri();
        let mut arguments = vec!["-f", "raw"];
        commands.iter().for_each(|command| arguments.extend(["-c", command]));
        arguments.push(&uri);
        let reported = run("qemu-io", &arguments);
        assert!(!reported.contains("failed") && !reported.contains("rror"), "{reported}");
    }
}

#[test]
fn read_only_export_rejects_writes_of_every_client() {
    if !are_tools_installed(&["qemu-io", "nbdinfo"]) {
        return;
    }
    let served = ServeProcess::start("ram:1m", &["--read-only"]);
    let uri = served.uri();
    assert!(run("nbdinfo", &[&uri]).contains("is_read_only: true"));
    run("qemu-io", &["-r", "-f", "raw", "-c", "read -P 0 0 64k", &uri]);
    let refused = Command::new("timeout")
        .args(["60", "qemu-io", "-f", "raw", "-c", "write 0 64k", &uri])
        .output()
        .unwrap();
    assert!(!refused.status.success(), "{refused:?}");
}

#[test]
fn file_exported_read_only_can_be_read_by_others() {
    let directory = tempfile::tempdir().unwrap();
    let disk = directory.path().join("disk");
    write_pattern(&disk, MIB);
    let uri = format!("file:{}", disk.display());
    let [one, _other] = [(); 2].map(|()| ServeProcess::start(&uri, &["--read-only"]));
    let how = format!("/proc/{}/fdinfo", one.pid());
    let links = std::fs::read_dir(format!("/proc/{}/fd", one.pid())).unwrap().flatten();
    let of_disk = links.filter(|link| std::fs::read_link(link.path()).is_ok_and(|at| at == disk));
    let flags: Vec<u32> = of_disk
        .map(|link| std::fs::read_to_string(Path::new(&how).join(link.file_name())).unwrap())
        .filter_map(|reported| {
            let flags = reported.lines().find_map(|line| line.strip_prefix("flags:"))?;
            u32::from_str_radix(flags.trim(), 8).ok()
        })
        .collect();
    assert!(!flags.is_empty());
    // Access modes are the two lowest bits, and to read is zero (fcntl(2)).
    assert!(flags.iter().all(|flags| flags & 3 == 0), "{flags:?}");
    let listen = format!("nbd:{}", directory.path().join("third").display());
    let writer = Command::new(env!("CARGO_BIN_EXE_tenmil"))
        .args(["serve", &uri, "--listen", &listen])
        .output()
        .unwrap();
    assert_eq!(writer.status.code(), Some(2), "{writer:?}");
}

/// A renewed key file takes the place of the former one, as `certbot` does it; the server has dropped its
/// rights by then.
#[test]
fn tls_keys_are_read_again_on_sighup() {
    if !tenmil_serve::HAS_TLS {
        println!("skipped: this program is built without TLS");
        return;
    }
    if !are_tools_installed(&["nbdinfo"]) {
        return;
    }
    let root = tempfile::tempdir().unwrap();
    let (keys, log) = (root.path().join("keys.psk"), root.path().join("log"));
    let write = |name: &str, text: &str| {
        let path = root.path().join(name);
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
        path
    };
    let [alice, bob] = ["5a", "a5"].map(|byte| byte.repeat(32));
    let all = write("all.psk", &format!("alice:{alice}\nbob:{bob}\n"));
    write("keys.psk", &format!("alice:{alice}\n"));
    let served = ServeProcess::start_shell_line(&format!(
        "{} serve ram:1m -l nbds://127.0.0.1:0 --nbd-tls-psk '{}' --sandbox=on 2>'{}'",
        env!("CARGO_BIN_EXE_tenmil"),
        keys.display(),
        log.display()
    ));
    let address = served.ready.trim().strip_prefix("ready nbds://").unwrap().to_owned();
    let is_served = |name: &str| {
        let uri = format!("nbds://{name}@{address}/?tls-psk-file={}", all.display());
        Command::new("nbdinfo").args(["--size", &uri]).output().unwrap().status.success()
    };
    let reload = |expected: &str| {
        run("kill", &["-HUP", &served.pid().to_string()]);
        let is_done = (0..200).any(|_| {
            std::thread::sleep(std::time::Duration::from_millis(50));
            std::fs::read_to_string(&log).unwrap().contains(expected)
        });
        assert!(is_done, "{expected}: {}", std::fs::read_to_string(&log).unwrap());
    };
    assert!(is_served("alice") && !is_served("bob"));
    std::fs::rename(write("next", &format!("bob:{bob}\n")), &keys).unwrap();
    assert!(!is_served("bob"), "not before the reload");
    reload("the certificate and the keys were read again");
    assert!(is_served("bob") && !is_served("alice"));
    std::fs::rename(write("next", "nonsense\n"), &keys).unwrap();
    reload("nothing is changed: ");
    assert!(is_served("bob"));
    served.rights_after_drop();
    assert_eq!(served.stop_with_sigterm(), Some(0));
}

#[test]
fn nbdinfo_shows_the_export_and_its_allocation() {
    if !are_tools_installed(&["nbdinfo"]) {
        return;
    }
    let served = ServeProcess::start("ram:8m", &["--export-name", "disk"]);
    let uri = served.uri();
    let reported: Value = serde_json::from_str(&run("nbdinfo", &["--json", &uri])).unwrap();
    assert_eq!(reported["protocol"], "newstyle-fixed");
    assert_eq!(reported["structured"], true);
    let export = &reported["exports"][0];
    assert_eq!(export["export-size"], 8 << 20);
    for (key, expected) in [
        ("can_multi_conn", true),
        ("can_trim", true),
        ("can_zero", true),
        ("can_fast_zero", true),
        ("can_df", true),
        // Memory forgets everything, and says so.
        ("can_flush", false),
        ("can_fua", false),
        ("is_read_only", false),
    ] {
        assert_eq!(export[key], expected, "{key}");
    }
    assert_eq!(
        (&export["block_size_minimum"], &export["block_size_maximum"]),
        (&512.into(), &(32 << 20).into())
    );
    let listed = run("nbdinfo", &["--list", &uri]);
    assert!(listed.contains("export=\"disk\""), "{listed}");
    let map: Value = serde_json::from_str(&run("nbdinfo", &["--map", "--json", &uri])).unwrap();
    let lengths = map.as_array().unwrap().iter().map(|extent| extent["length"].as_u64().unwrap());
    assert_eq!(lengths.sum::<u64>(), 8 << 20, "{map}");
}

#[test]
fn holes_of_a_file_are_reported_through_stacked_devices() {
    if !are_tools_installed(&["nbdinfo"]) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let disk = directory.path().join("disk");
    let file = std::fs::File::create(&disk).unwrap();
    file.set_len(16 << 20).unwrap();
    file.write_all_at(&[1; MIB], 5 << 20).unwrap();
    file.sync_all().unwrap();
    let uri = format!("delay:[split:[file:{}]?offset=4m]?read=1us", disk.display());
    let served = ServeProcess::start(&uri, &["--read-only"]);
    let map = run("nbdinfo", &["--map", "--json", &served.uri()]);
    let map: Value = serde_json::from_str(&map).unwrap();
    let extents: Vec<(u64, u64)> = map
        .as_array()
        .unwrap()
        .iter()
        .map(|extent| (extent["length"].as_u64().unwrap(), extent["type"].as_u64().unwrap()))
        .collect();
    if extents == [(12 << 20, 0)] {
        return println!("skipped: this file system does not tell its holes");
    }
    // Holes that read as zeroes (3), and data (0).
    assert_eq!(extents, [(1 << 20, 3), (1 << 20, 0), (10 << 20, 3)]);
}

#[test]
fn nbdcopy_copies_to_and_from_the_export_over_many_connections() {
    if !are_tools_installed(&["nbdcopy"]) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let [disk, source, back] = ["disk", "source", "back"].map(|name| directory.path().join(name));
    write_pattern(&source, 16 * MIB);
    let uri = format!("file:{}?size=16m", disk.display());
    let served = ServeProcess::start(&uri, &["--listen", "nbd://127.0.0.1:0"]);
    let port = served.ready.split_whitespace().nth(2).unwrap().to_owned();
    run("nbdcopy", &["--flush", source.to_str().unwrap(), &served.uri()]);
    run("nbdcopy", &["--connections=4", &port, back.to_str().unwrap()]);
    assert_eq!(served.stop_with_sigterm(), Some(0));
    let sent = std::fs::read(&source).unwrap();
    assert!(sent == std::fs::read(&disk).unwrap() && sent == std::fs::read(&back).unwrap());
}

#[test]
fn thin_volume_reads_are_exact_although_holes_are_not_sent() {
    if !are_tools_installed(&["nbdcopy"]) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let [pool, source, back] = ["pool", "source", "back"].map(|name| directory.path().join(name));
    // Every third MiB has data.
    let mut bytes = vec![0; 16 * MIB];
    for (index, part) in bytes.chunks_mut(MIB).enumerate().step_by(3) {
        part.fill(u8::try_from(index + 1).unwrap());
    }
    std::fs::write(&source, &bytes).unwrap();
    let device = format!("file:{}?size=64m", pool.display());
    let tenmil = env!("CARGO_BIN_EXE_tenmil");
    run(tenmil, &["pool", "create", &device]);
    let volume = format!("{}/v", pool.display());
    run(tenmil, &["volume", "create", &volume, "--size", "16m"]);
    let served = ServeProcess::start(&volume, &[]);
    run("nbdcopy", &[source.to_str().unwrap(), &served.uri()]);
    // Reads of everything, large and small, without asking where holes are.
    for size in ["4096", "65536", "1048576"] {
        let _ = std::fs::remove_file(&back);
        let size = format!("--request-size={size}");
        run("nbdcopy", &["--no-extents", &size, &served.uri(), back.to_str().unwrap()]);
        assert!(std::fs::read(&back).unwrap() == bytes, "{size}");
    }
    assert_eq!(served.stop_with_sigterm(), Some(0));
}

#[test]
fn fio_verifies_its_writes() {
    if !are_tools_installed(&["fio"]) || !run("fio", &["--enghelp"]).contains("nbd") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let disk = directory.path().join("disk");
    for (uri, load) in [
        (format!("file:{}?size=32m", disk.display()), &["--bs=4k", "--iodepth=64"][..]),
        ("ram:32m".into(), &["--bsrange=512-128k", "--iodepth=200"]),
        ("ram:32m".into(), &["--bs=1m", "--iodepth=40"]),
    ] {
        let served = ServeProcess::start(&uri, &[]);
        let uri = format!("--uri={}", served.uri());
        let mut arguments = vec!["--name=verify", "--ioengine=nbd", &uri, "--rw=randwrite"];
        arguments.extend(["--size=32m", "--verify=crc32c", "--verify_fatal=1", "--randrepeat=1"]);
        arguments.extend(load);
        let reported = run("fio", &arguments);
        assert!(reported.contains("err= 0"), "{reported}");
        assert_eq!(served.stop_with_sigterm(), Some(0));
    }
}
