//! Clients of a TLS port that never end their handshakes, or violate them: memory stays bounded, and others
//! are answered. Runs in a process of its own, because it measures the memory of the whole process.

#![cfg(feature = "tls")]
#![expect(clippy::unwrap_used, reason = "a test may")]
#![expect(
    clippy::disallowed_methods,
    reason = "a test connects as others do, and reads what openssl wrote"
)]

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde_json::Map;
use tenmil_base::{Random, Span};
use tenmil_linux::Clock;
use tenmil_linux::process_stats::ProcessStats;
use tenmil_linux::runtime_directory::RuntimeDirectory;
use tenmil_nvme_auth::SecretBytes;
use tenmil_rpc::{
    ControlCertificate, ControlEndpoint, ControlListeners, ControlTls, HttpCredentials,
    ProcessParts, ProgramInfo, RpcClient, RpcServer, TABLE, event_channel,
};

const TIME_LIMIT: Span = Span::from_secs(20);

struct TestServer {
    server: RpcServer,
    ca_pem: Vec<u8>,
    root: tempfile::TempDir,
}

/// Writes a certificate that signs itself; false if there is no openssl.
fn write_certificate(directory: &Path) -> bool {
    let mut command = Command::new("openssl");
    command.args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]);
    command.args(["-nodes", "-days", "2", "-subj", "/CN=test"]);
    command.args(["-addext", "subjectAltName=IP:127.0.0.1"]);
    command.args(["-keyout", "key.pem", "-out", "certificate.pem"]).current_dir(directory);
    let is_written = command.output().is_ok_and(|output| output.status.success());
    if !is_written {
        assert!(std::env::var_os("TENMIL_REQUIRE_TOOLS").is_none(), "openssl is missing");
        println!("skipped: there is no openssl");
    }
    is_written
}

/// Server with a Unix socket, and a TLS port whose clients need no certificate.
fn start_server() -> Option<TestServer> {
    let root = tempfile::tempdir().unwrap();
    if !write_certificate(root.path()) {
        return None;
    }
    let read = |name: &str| std::fs::read(root.path().join(name)).unwrap();
    let (chain_pem, key_pem) = (read("certificate.pem"), SecretBytes::new(read("key.pem")));
    let ca_pem = chain_pem.clone();
    let tls = ControlTls::new(&ControlCertificate { chain_pem, key_pem }, None).unwrap();
    let directory = RuntimeDirectory::at_path(root.path().join("run")).unwrap();
    let mut listeners = ControlListeners::new();
    listeners.add_process_socket(&directory, 7, None).unwrap();
    listeners.add_tls("127.0.0.1:0".parse().unwrap(), &tls).unwrap();
    let (_, announced) = event_channel().unwrap();
    let state = ProcessParts::new().with_part(ProgramInfo { version: "1", log: None });
    let server = RpcServer::start_at(listeners, &TABLE, state, announced).unwrap();
    Some(TestServer { server, ca_pem, root })
}

impl TestServer {
    fn address(&self) -> SocketAddr {
        self.server.tcp_addresses()[0].0
    }

    fn connect_stream(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream.set_write_timeout(Some(Duration::from_secs(20))).unwrap();
        stream
    }

    fn connect_client(&self) -> RpcClient {
        let ca_pem = Some(self.ca_pem.clone());
        let credentials = HttpCredentials { ca_pem, ..HttpCredentials::default() };
        let url = format!("https://{}", self.address());
        let endpoint = ControlEndpoint::from_url(&url, credentials).unwrap();
        RpcClient::connect_to(&endpoint, TIME_LIMIT).unwrap()
    }
}

fn resident_bytes() -> u64 {
    ProcessStats::read().resident_bytes.unwrap_or_default()
}

/// First message of a client, as openssl sends it.
fn client_hello(served: &TestServer) -> Vec<u8> {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mut client = Command::new("openssl")
        .args(["s_client", "-connect", &listener.local_addr().unwrap().to_string()])
        .current_dir(served.root.path())
        .stdin(std::process::Stdio::null())
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let mut bytes = vec![0; 4096];
    let count = listener.accept().unwrap().0.read(&mut bytes).unwrap();
    client.wait().unwrap();
    bytes.truncate(count);
    bytes
}

/// Garbage, or a first message with changes.
fn malformed(hello: &[u8], random: &mut Random) -> Vec<u8> {
    let mut below = |limit: usize| usize::try_from(random.below(limit as u64)).unwrap();
    let mut bytes = hello.to_vec();
    for _ in 0..=below(4) {
        let at = below(bytes.len());
        match below(6) {
            0 | 1 => bytes[at] = u8::try_from(below(256)).unwrap(),
            2 => bytes.truncate(at.max(1)),
            3 => bytes.extend_from_within(at..),
            4 => bytes.splice(at..at, vec![0x16; below(50_000)]).for_each(drop),
            _ => bytes = (0..=below(3_000)).map(|_| u8::try_from(below(256)).unwrap()).collect(),
        }
    }
    bytes
}

#[test]
fn malformed_and_endless_handshakes_cost_bounded_memory_and_delay_no_other_client() {
    let Some(served) = start_server() else { return };
    let hello = client_hello(&served);
    let clock = Clock::start();
    let begun = clock.now();
    let mut local = RpcClient::connect(served.server.socket_path(), TIME_LIMIT).unwrap();
    let mut remote = served.connect_client();
    let call = |client: &mut RpcClient, round: u32| {
        let called = client.call_method("methods", Map::new(), TIME_LIMIT);
        assert!(called.unwrap().is_array(), "in round {round}");
    };
    // Half of them begin a record, and none ends it.
    let mut slow: Vec<TcpStream> = (0..60).map(|_| served.connect_stream()).collect();
    for stream in &mut slow[..30] {
        stream.write_all(&hello[..hello.len() / 2]).unwrap();
    }
    let mut random = Random::new(32);
    let mut before = 0;
    for round in 0..3_000 {
        if round == 300 {
            before = resident_bytes();
        }
        let mut stream = served.connect_stream();
        // The connection may be closed before everything is sent.
        let _ = stream.write_all(&malformed(&hello, &mut random));
        if round % 2 == 0 {
            let _ = stream.shutdown(Shutdown::Write);
        }
        if round % 100 == 0 {
            call(&mut local, round);
            call(&mut remote, round);
            call(&mut served.connect_client(), round);
        }
    }
    let grown = resident_bytes().saturating_sub(before);
    assert!(before > 0 && grown < 32 << 20, "{grown} bytes more than before");
    // What never ends its handshake is closed after 10 s at the latest.
    for stream in &mut slow {
        let _ = stream.read_to_end(&mut Vec::new());
    }
    let seconds = clock.now().since(begun).as_secs_f64();
    assert!(seconds < 120.0, "{seconds} s: the deadline of a handshake is kept");
    call(&mut local, u32::MAX);
    call(&mut remote, u32::MAX);
}

/// After the first message of the client the server has sent its own; each end of the connection, and bytes
/// that are no record, end it.
#[test]
fn handshake_that_stops_half_way_is_closed() {
    let Some(served) = start_server() else { return };
    let hello = client_hello(&served);
    for (index, rest) in [&b""[..], b"GET / HTTP/1.1\r\n\r\n", &[0xff; 70_000]].iter().enumerate() {
        let mut stream = served.connect_stream();
        stream.write_all(&hello).unwrap();
        let mut first = [0; 1];
        stream.read_exact(&mut first).unwrap();
        assert_eq!(first, [0x16], "a handshake record");
        let _ = stream.write_all(rest);
        let _ = stream.shutdown(Shutdown::Write);
        // Whatever comes, an end or a reset comes then.
        let ended = stream.read_to_end(&mut Vec::new());
        let is_timeout = ended.is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock);
        assert!(!is_timeout, "case {index}");
    }
    let called = served.connect_client().call_method("methods", Map::new(), TIME_LIMIT);
    assert!(called.unwrap().is_array());
}

#[test]
fn request_without_tls_is_answered_in_plaintext() {
    let Some(served) = start_server() else { return };
    let mut stream = served.connect_stream();
    stream.write_all(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n").unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).unwrap();
    assert!(response.starts_with("HTTP/1.1 403 "), "{response}");
    assert!(response.contains("expected https:// at this port"), "{response}");
}
