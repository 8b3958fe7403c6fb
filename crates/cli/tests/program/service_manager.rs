//! `tenmil serve` under a service manager: what it reports to systemd, and the sockets that it takes over.

use std::io::{BufRead, BufReader, Read};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

const TENMIL: &str = env!("CARGO_BIN_EXE_tenmil");
/// Longest time that the service may take for a step.
const LONG: Duration = Duration::from_secs(30);

/// A service that was started as a service manager does it. Dropping it ends it.
struct Service {
    child: Child,
    ready: String,
}

impl Service {
    fn start(mut command: Command, root: &Path) -> Self {
        command.env("XDG_RUNTIME_DIR", root).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut ready = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut ready).unwrap();
        assert!(ready.starts_with("ready "), "{ready}");
        Self { child, ready: ready.trim().to_owned() }
    }

    fn send_signal(&self, name: &str) {
        let status = Command::new("kill").args([name, &self.child.id().to_string()]).status();
        assert!(status.unwrap().success());
    }

    fn stop(mut self) {
        self.send_signal("-TERM");
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The next notification that is none of the watchdog.
fn next_notification(manager: &UnixDatagram) -> String {
    manager.set_read_timeout(Some(LONG)).unwrap();
    let mut bytes = [0; 4096];
    loop {
        let count = manager.recv(&mut bytes).unwrap();
        let text = String::from_utf8(bytes[..count].to_vec()).unwrap();
        if text != "WATCHDOG=1" {
            return text;
        }
    }
}

fn write_configuration(directory: &Path, listener: &str) -> String {
    let path = directory.join("target.toml");
    let subsystem = "[[subsystem]]\nnqn = \"nqn.2026-01.example:disk\"\n";
    let namespace = "[[subsystem.namespace]]\nuri = \"ram:1m\"\n";
    let text = format!("[[listener]]\naddress = \"{listener}\"\n{subsystem}{namespace}");
    std::fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

/// Start, reload, refused reload, watchdog and stop, as reported to `manager` at `name`.
fn check_notifications(manager: &UnixDatagram, name: &str) {
    let root = tempfile::tempdir().unwrap();
    let file = write_configuration(root.path(), "127.0.0.1:0");
    let mut command = Command::new(TENMIL);
    command.args(["serve", "--config", &file]);
    command.env("NOTIFY_SOCKET", name).env("WATCHDOG_USEC", "400000");
    let service = Service::start(command, root.path());
    let address = service.ready.strip_prefix("ready ").unwrap().to_owned();
    assert_eq!(next_notification(manager), format!("READY=1\nSTATUS=listening at {address}"));
    // Of the watchdog there is one in half of its time, and no flood.
    let mut bytes = [0; 100];
    for _ in 0..3 {
        let count = manager.recv(&mut bytes).unwrap();
        assert_eq!(&bytes[..count], b"WATCHDOG=1");
    }
    for (text, result) in [
        ("", format!("READY=1\nSTATUS=listening at {address}")),
        (
            "wrong = 1\n",
            format!("READY=1\nSTATUS=listening at {address}; the last reload changed nothing: "),
        ),
    ] {
        let before = std::fs::read_to_string(&file).unwrap();
        std::fs::write(&file, format!("{text}{before}")).unwrap();
        service.send_signal("-HUP");
        let began = next_notification(manager);
        assert!(began.starts_with("RELOADING=1\nMONOTONIC_USEC="), "{began}");
        let ended = next_notification(manager);
        assert!(ended.starts_with(&result), "{ended}, expected {result}");
    }
    service.stop();
    assert_eq!(next_notification(manager), "STOPPING=1\nSTATUS=draining connections");
}

#[test]
fn states_are_reported_to_a_socket_with_a_path() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("notify");
    let manager = UnixDatagram::bind(&path).unwrap();
    check_notifications(&manager, path.to_str().unwrap());
}

#[test]
fn states_are_reported_to_an_abstract_socket_despite_the_sandbox() {
    let name = format!("tenmil-test-{}", std::process::id());
    let address = SocketAddr::from_abstract_name(&name).unwrap();
    let manager = UnixDatagram::bind_addr(&address).unwrap();
    check_notifications(&manager, &format!("@{name}"));
}

#[test]
fn server_without_a_configuration_file_confirms_a_reload() {
    for listen in ["tcp://127.0.0.1:0", "vhost-user:SOCKET", "vfio-user:SOCKET", "nbd:SOCKET"] {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("notify");
        let manager = UnixDatagram::bind(&path).unwrap();
        let listen = listen.replace("SOCKET", root.path().join("s").to_str().unwrap());
        let mut command = Command::new(TENMIL);
        command.args(["serve", "ram:1m", "--listen", &listen]).env("NOTIFY_SOCKET", &path);
        let service = Service::start(command, root.path());
        let ready = next_notification(&manager);
        assert!(ready.starts_with("READY=1\nSTATUS=listening at "), "{ready}");
        service.send_signal("-HUP");
        assert!(next_notification(&manager).starts_with("RELOADING=1\n"), "{listen}");
        assert!(next_notification(&manager).starts_with("READY=1\n"), "{listen}");
        service.stop();
        assert!(next_notification(&manager).starts_with("STOPPING=1\n"), "{listen}");
    }
}

#[test]
fn notification_socket_that_is_not_there_is_an_error() {
    let mut command = Command::new(TENMIL);
    command.args(["serve", "ram:1m", "--listen", "tcp://127.0.0.1:0"]);
    let output = command.env("NOTIFY_SOCKET", "/nonexistent/notify").output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(errors.contains("connect to the service manager at $NOTIFY_SOCKET: "), "{errors}");
}

/// A command line of `tenmil` that has the sockets as descriptors 3 and 4, as a service manager passes them.
fn command_with_sockets(line: &str, first: OwnedFd, second: OwnedFd) -> Command {
    let mut command = Command::new("bash");
    let script = format!(
        "exec 3<&0 4<&2 </dev/null 2>\"$ERRORS\"; LISTEN_PID=$$ LISTEN_FDS=2 LISTEN_FDNAMES=one:two exec {line}"
    );
    command.args(["-c", &script]).stdin(first).stderr(second);
    command
}

#[test]
fn passed_sockets_are_used_and_outlive_the_server() {
    let root = tempfile::tempdir().unwrap();
    let errors = root.path().join("errors");
    let path = root.path().join("nbd.sock");
    let (tcp, local) =
        (TcpListener::bind("127.0.0.1:0").unwrap(), UnixListener::bind(&path).unwrap());
    let port = tcp.local_addr().unwrap();
    let line = format!("{TENMIL} serve ram:1m -l nbd://{port} -l nbd:{}", path.display());
    for _ in 0..2 {
        let (first, second) = (tcp.try_clone().unwrap(), local.try_clone().unwrap());
        let mut command = command_with_sockets(&line, first.into(), second.into());
        command.env("ERRORS", &errors);
        let service = Service::start(command, root.path());
        assert_eq!(service.ready, format!("ready nbd://{port} nbd:{}", path.display()));
        let mut magic = [0; 8];
        let mut client = TcpStream::connect(port).unwrap();
        client.set_read_timeout(Some(LONG)).unwrap();
        client.read_exact(&mut magic).unwrap();
        assert_eq!(&magic, b"NBDMAGIC");
        let mut client = UnixStream::connect(&path).unwrap();
        client.set_read_timeout(Some(LONG)).unwrap();
        client.read_exact(&mut magic).unwrap();
        assert_eq!(&magic, b"NBDMAGIC");
        service.stop();
        assert!(path.exists(), "the file belongs to the service manager");
        let errors = std::fs::read_to_string(&errors).unwrap();
        assert!(!errors.contains("no listener has this address"), "{errors}");
    }
    // While no server runs, clients wait.
    TcpStream::connect(port).unwrap();
}

#[test]
fn passed_socket_without_a_listener_is_reported() {
    let root = tempfile::tempdir().unwrap();
    let errors = root.path().join("errors");
    let (one, other) =
        (TcpListener::bind("127.0.0.1:0").unwrap(), TcpListener::bind("127.0.0.1:0").unwrap());
    let (port, unused) = (one.local_addr().unwrap(), other.local_addr().unwrap());
    let line = format!("{TENMIL} serve ram:1m -l tcp://{port}");
    let mut command = command_with_sockets(&line, one.into(), other.into());
    command.env("ERRORS", &errors);
    let service = Service::start(command, root.path());
    assert_eq!(service.ready, format!("ready tcp://{port}"));
    let uri = format!("tcp://{port}/nqn.2026-01.org.tenmil:disk/1");
    let output = Command::new(TENMIL).args(["perf", &uri, "-t", "0.1"]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    service.stop();
    let errors = std::fs::read_to_string(&errors).unwrap();
    let expected = format!("passed the socket {unused} (two), and no listener has this address");
    assert!(errors.contains(&expected), "{errors}");
}

#[test]
fn descriptor_that_is_no_listening_socket_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let errors = root.path().join("errors");
    let file = || OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
    let line = format!("{TENMIL} serve ram:1m -l tcp://127.0.0.1:0");
    let mut command = command_with_sockets(&line, file(), file());
    let status = command.env("ERRORS", &errors).stdout(Stdio::null()).status().unwrap();
    assert_eq!(status.code(), Some(1));
    let errors = std::fs::read_to_string(&errors).unwrap();
    assert!(errors.contains("descriptor 3 (one), which was passed: "), "{errors}");
}
