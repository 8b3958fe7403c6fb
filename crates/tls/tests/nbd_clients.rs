//! NBD over TLS with stock clients: libnbd's tools and qemu-img, with GnuTLS. A client that is not
//! installed is skipped, and the test prints so.

#![expect(clippy::unwrap_used, reason = "a test may")]
#![expect(clippy::disallowed_methods, reason = "clients are processes that read files")]

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::Arc;

use tenmil_block::{Bdev, BdevOptions};
use tenmil_dma::RegionTable;
use tenmil_drivers::RamDevice;
use tenmil_linux::socket_stream::{ListenAddress, StreamListener};
use tenmil_linux::{Clock, CpuList};
use tenmil_nvme_auth::SecretBytes;
use tenmil_reactor::{PollMode, ReactorOptions, Reactors};
use tenmil_serve::nbd::{
    ExportConfig, ExportedDevice, NbdCertificate, NbdEvent, NbdPsk, NbdTls, Server, ServerConfig,
};

/// Server with two listeners: TLS is required at the first, and allowed at the second.
struct TlsServer {
    server: Option<Server>,
    reactors: Option<Reactors>,
    required: u16,
    allowed: u16,
    _device: Bdev,
}

const SIZE: usize = 4 << 20;
const PSK: [u8; 32] = [0x5a; 32];

impl TlsServer {
    fn start(certificate: Option<NbdCertificate>, psks: Vec<NbdPsk>) -> Self {
        let clock = Clock::start();
        let cores: CpuList = CpuList::allowed_cpus().iter().take(2).collect();
        let options = ReactorOptions { poll: PollMode::Adaptive, ..ReactorOptions::default() };
        let reactors = Reactors::start_on_cores(&cores, &options, &clock).unwrap();
        let regions = RegionTable::new(16);
        let medium = Arc::new(RamDevice::new(&regions, 512, SIZE as u64 / 512).unwrap());
        let device = Bdev::new("ram0", medium, BdevOptions::new(clock, 1)).unwrap();
        let exported_device = ExportedDevice::new(ExportConfig {
            name: "disk".into(),
            description: String::new(),
            uri: "ram:4m".into(),
            device: &device,
            limits: tenmil_block::QosLimits::default(),
            is_read_only: false,
            allows_resize: false,
            regions: &regions,
        });
        let any = ListenAddress::Tcp("127.0.0.1:0".parse().unwrap());
        let listen_sockets = [&any, &any].map(|address| StreamListener::open(address).unwrap());
        let server = Server::start(ServerConfig {
            listen_sockets: listen_sockets.into(),
            exports: vec![Arc::new(exported_device.unwrap())],
            regions: regions.clone(),
            reactors: Arc::clone(reactors.registry()),
            clock,
            connections_max: 32,
            per_address_max: 32,
            idle_max: None,
            tls: Some(NbdTls { required: vec![true, false], certificate, psks }),
        })
        .unwrap();
        let port = |address: &ListenAddress| match address {
            ListenAddress::Tcp(address) => address.port(),
            ListenAddress::Path(_) => panic!("a port"),
        };
        let (required, allowed) = (port(&server.addresses()[0]), port(&server.addresses()[1]));
        Self { server: Some(server), reactors: Some(reactors), required, allowed, _device: device }
    }

    fn expect_error(&self, text: &str) {
        let mut seen = Vec::new();
        for _ in 0..2_000 {
            match self.server.as_ref().unwrap().next_event() {
                Some(NbdEvent::Error(error)) if error.contains(text) => return,
                Some(event) => seen.push(event),
                None => tenmil_linux::named_thread::sleep(tenmil_base::Span::from_ms(5)),
            }
        }
        panic!("no error contains `{text}`, but {seen:#?}");
    }
}

impl Drop for TlsServer {
    fn drop(&mut self) {
        drop(self.server.take());
        if let Some(reactors) = self.reactors.take() {
            reactors.stop();
        }
    }
}

/// Runs a client; `None` if it is not installed.
fn run(program: &str, arguments: &[&str]) -> Option<Output> {
    let output = Command::new("timeout").arg("30").arg(program).args(arguments).output().unwrap();
    if output.status.code() == Some(127) {
        eprintln!("skipped: {program} is not installed");
        return None;
    }
    Some(output)
}

fn text_of(output: &Output) -> String {
    let (out, error) = (&output.stdout, &output.stderr);
    format!("{}{}", String::from_utf8_lossy(out), String::from_utf8_lossy(error))
}

fn assert_succeeds(program: &str, arguments: &[&str]) {
    if let Some(output) = run(program, arguments) {
        assert!(output.status.success(), "{program} {arguments:?}: {}", text_of(&output));
    }
}

fn assert_fails(program: &str, arguments: &[&str]) {
    if let Some(output) = run(program, arguments) {
        assert!(!output.status.success(), "{program} {arguments:?}: {}", text_of(&output));
    }
}

fn pattern_file(path: &Path) -> Vec<u8> {
    let bytes: Vec<u8> = (0..SIZE).map(|at| u8::try_from(at / 7 % 251).unwrap()).collect();
    std::fs::write(path, &bytes).unwrap();
    bytes
}

/// Copies a pattern to the server and back, and asks for the size.
fn copy_both_ways(uri: &str, directory: &Path) {
    let (from, to) = (directory.join("from"), directory.join("to"));
    let expected = pattern_file(&from);
    assert_succeeds("nbdinfo", &["--size", uri]);
    if run("nbdcopy", &["--version"]).is_none() {
        return;
    }
    assert_succeeds("nbdcopy", &[from.to_str().unwrap(), uri]);
    assert_succeeds("nbdcopy", &[uri, to.to_str().unwrap()]);
    assert!(std::fs::read(&to).unwrap() == expected, "{uri}: other bytes have come back");
}

fn openssl(arguments: &[&str]) {
    let output = Command::new("openssl").args(arguments).output().unwrap();
    assert!(output.status.success(), "openssl {arguments:?}: {}", text_of(&output));
}

/// Certificate authority, and certificates of a server and a client that it has signed, under the
/// names that libnbd and qemu look for.
fn write_certificates(directory: &Path) {
    let path = |name: &str| directory.join(name).to_str().unwrap().to_owned();
    let (ca, ca_key) = (path("ca-cert.pem"), path("ca-key.pem"));
    openssl(&[
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=test authority",
        "-keyout",
        &ca_key,
        "-out",
        &ca,
    ]);
    for (name, usage) in [("server", "serverAuth"), ("client", "clientAuth")] {
        let key = path(&format!("{name}-key.pem"));
        let (request, certificate) = (path("request"), path(&format!("{name}-cert.pem")));
        let extensions = path("extensions");
        let subject = format!("/CN={name}");
        openssl(&[
            "req",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:P-256",
            "-nodes",
            "-subj",
            &subject,
            "-keyout",
            &key,
            "-out",
            &request,
        ]);
        let text = format!(
            "subjectAltName=DNS:localhost,IP:127.0.0.1\nextendedKeyUsage={usage}\n\
             keyUsage=digitalSignature\nbasicConstraints=CA:FALSE\n"
        );
        std::fs::write(&extensions, text).unwrap();
        openssl(&[
            "x509",
            "-req",
            "-in",
            &request,
            "-CA",
            &ca,
            "-CAkey",
            &ca_key,
            "-CAcreateserial",
            "-days",
            "2",
            "-extfile",
            &extensions,
            "-out",
            &certificate,
        ]);
    }
}

fn certificate(directory: &Path, verifies_clients: bool) -> NbdCertificate {
    let read = |name: &str| std::fs::read(directory.join(name)).unwrap();
    NbdCertificate {
        chain_pem: read("server-cert.pem"),
        key_pem: SecretBytes::new(read("server-key.pem")),
        client_ca_pem: verifies_clients.then(|| read("ca-cert.pem")),
    }
}

#[test]
fn clients_with_pre_shared_keys_are_served() {
    let directory = tempfile::tempdir().unwrap();
    let hex: String = PSK.iter().map(|byte| format!("{byte:02x}")).collect();
    let keys = directory.path().join("keys.psk");
    std::fs::write(&keys, format!("alice:{hex}\nmallory:{}\n", "00".repeat(32))).unwrap();
    std::fs::set_permissions(&keys, PermissionsExt::from_mode(0o600)).unwrap();
    let alice = NbdPsk { identity: "alice".into(), secret: SecretBytes::new(PSK.to_vec()) };
    let server = TlsServer::start(None, vec![alice]);
    let (required, allowed) = (server.required, server.allowed);
    let keys = keys.to_str().unwrap();
    for port in [required, allowed] {
        let uri = format!("nbds://alice@127.0.0.1:{port}/?tls-psk-file={keys}");
        copy_both_ways(&uri, directory.path());
    }
    copy_both_ways(&format!("nbd://127.0.0.1:{allowed}"), directory.path());
    assert_fails("nbdinfo", &["--size", &format!("nbd://127.0.0.1:{required}")]);
    let stranger = format!("nbds://mallory@127.0.0.1:{required}/?tls-psk-file={keys}");
    if run("nbdinfo", &["--size", &stranger]).is_some() {
        server.expect_error("no key for identity \"mallory\" in the key file of this server");
    }
    let object = format!(
        "tls-creds-psk,id=tls0,endpoint=client,username=alice,dir={}",
        directory.path().display()
    );
    let image = format!("driver=nbd,host=127.0.0.1,port={required},tls-creds=tls0");
    assert_succeeds("qemu-img", &["info", "--object", &object, "--image-opts", &image]);
    assert_fails("qemu-img", &["info", &format!("nbd://127.0.0.1:{required}")]);
    assert_succeeds("qemu-img", &["info", &format!("nbd://127.0.0.1:{allowed}")]);
}

/// For clients that connect from then on; a replacement that cannot be used changes nothing.
#[test]
fn keys_and_certificates_are_replaced_while_the_server_runs() {
    let directory = tempfile::tempdir().unwrap();
    let keys = directory.path().join("keys.psk");
    let text = format!("alice:{}\nbob:{}\n", "5a".repeat(32), "a5".repeat(32));
    std::fs::write(&keys, text).unwrap();
    std::fs::set_permissions(&keys, PermissionsExt::from_mode(0o600)).unwrap();
    let psk = |name: &str, byte| NbdPsk {
        identity: name.into(),
        secret: SecretBytes::new(vec![byte; 32]),
    };
    let server = TlsServer::start(None, vec![psk("alice", 0x5a)]);
    let uri = |name: &str| {
        format!("nbds://{name}@127.0.0.1:{}/?tls-psk-file={}", server.required, keys.display())
    };
    assert_succeeds("nbdinfo", &["--size", &uri("alice")]);
    assert_fails("nbdinfo", &["--size", &uri("bob")]);
    let running = server.server.as_ref().unwrap();
    let replacement =
        NbdTls { required: Vec::new(), certificate: None, psks: vec![psk("bob", 0xa5)] };
    running.replace_tls(&replacement).unwrap();
    assert_succeeds("nbdinfo", &["--size", &uri("bob")]);
    assert_fails("nbdinfo", &["--size", &uri("alice")]);
    assert_fails("nbdinfo", &["--size", &format!("nbd://127.0.0.1:{}", server.required)]);
    write_certificates(directory.path());
    let broken = NbdCertificate {
        key_pem: SecretBytes::new(b"no key".to_vec()),
        ..certificate(directory.path(), false)
    };
    let broken = NbdTls { certificate: Some(broken), ..replacement.clone() };
    assert!(running.replace_tls(&broken).is_err());
    assert_succeeds("nbdinfo", &["--size", &uri("bob")]);
    let certificate = Some(certificate(directory.path(), false));
    running.replace_tls(&NbdTls { certificate, psks: Vec::new(), ..replacement }).unwrap();
    let certificates = directory.path().display();
    let of_certificate =
        format!("nbds://localhost:{}/?tls-certificates={certificates}", server.required);
    assert_succeeds("nbdinfo", &["--size", &of_certificate]);
    assert_fails("nbdinfo", &["--size", &uri("bob")]);
}

#[test]
fn clients_verify_the_certificate_of_the_server() {
    let directory = tempfile::tempdir().unwrap();
    write_certificates(directory.path());
    let server = TlsServer::start(Some(certificate(directory.path(), false)), Vec::new());
    let certificates = directory.path().to_str().unwrap();
    let uri = format!("nbds://localhost:{}/?tls-certificates={certificates}", server.required);
    copy_both_ways(&uri, directory.path());
    let object = format!("tls-creds-x509,id=tls0,endpoint=client,dir={certificates}");
    let image = format!("driver=nbd,host=localhost,port={},tls-creds=tls0", server.required);
    assert_succeeds("qemu-img", &["info", "--object", &object, "--image-opts", &image]);
    // Another authority.
    let other = tempfile::tempdir().unwrap();
    write_certificates(other.path());
    let other = other.path().to_str().unwrap();
    let uri = format!("nbds://localhost:{}/?tls-certificates={other}", server.required);
    assert_fails("nbdinfo", &["--size", &uri]);
}

#[test]
fn clients_need_a_certificate_of_the_configured_authority() {
    let directory = tempfile::tempdir().unwrap();
    write_certificates(directory.path());
    let server = TlsServer::start(Some(certificate(directory.path(), true)), Vec::new());
    let certificates = directory.path().to_str().unwrap();
    let uri = format!("nbds://localhost:{}/?tls-certificates={certificates}", server.required);
    copy_both_ways(&uri, directory.path());
    // The authority only: this client has no certificate.
    let without = tempfile::tempdir().unwrap();
    let ca = without.path().join("ca-cert.pem");
    std::fs::copy(directory.path().join("ca-cert.pem"), ca).unwrap();
    let without = without.path().to_str().unwrap();
    let uri = format!("nbds://localhost:{}/?tls-certificates={without}", server.required);
    assert_fails("nbdinfo", &["--size", &uri]);
}
