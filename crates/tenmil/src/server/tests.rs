//! Servers: what is exported, to whom, by which claim, and until when.

#![allow(clippy::disallowed_methods, reason = "a test takes addresses that servers want")]

use std::net::TcpListener;
use std::os::unix::net::UnixStream;

use smol::block_on;
use tenmil_base::{Error, ErrorCategory};

use crate::access::Access;
use crate::device::Device;
use crate::export::{Export, NbdTls};
use crate::runtime::Runtime;

const LOCAL: &str = "127.0.0.1:0";

/// A host that gives its target up soon.
const IMPATIENT: &str = "reconnect-delay=100ms&fast-io-fail-timeout=100ms&ctrl-loss-timeout=300ms";

fn test_runtime() -> Runtime {
    let core = tenmil_linux::CpuList::allowed_cpus().iter().next();
    Runtime::builder().cores(core).pin(false).start().unwrap()
}

fn open_ram_device(rt: &Runtime, uri: &str, access: Access) -> Result<Device, Error> {
    block_on(rt.open(uri, access))
}

fn serve_error(rt: &Runtime, export: Export) -> Error {
    block_on(rt.serve(export)).unwrap_err()
}

/// Writes a block through one handle and reads it through the other.
fn check_write_is_read_by_other(byte: u8, from: &Device, to: &Device) {
    let mut buffer = from.buffer(512).unwrap();
    buffer.store(0, &[byte; 512]);
    block_on(from.write(u64::from(byte), buffer)).unwrap();
    let read = block_on(to.read(u64::from(byte), to.buffer(512).unwrap())).unwrap();
    assert_eq!(read.to_vec(), [byte; 512]);
}

#[test]
fn host_and_program_share_the_exported_device() {
    let rt = test_runtime();
    let device = open_ram_device(&rt, "ram:1m", Access::ReadWrite).unwrap();
    let server = rt.serve(Export::nvme_tcp(LOCAL).namespace(device.clone()));
    let server = block_on(server).unwrap();
    let host = open_ram_device(&rt, &server.uris()[0], Access::ReadWrite).unwrap();
    check_write_is_read_by_other(3, &device, &host);
    check_write_is_read_by_other(4, &host, &device);
    // The claim stays with the export when the program drops its handle.
    drop(device);
    let other = open_ram_device(&rt, "ram:1m", Access::ReadWrite).unwrap_err();
    assert!(other.text.contains("it is open read-write in this runtime"), "{other}");
    let reader = open_ram_device(&rt, "ram:1m", Access::ReadOnly).unwrap();
    check_write_is_read_by_other(5, &host, &reader);
    block_on(host.close());
    block_on(reader.close());
    block_on(server.stop());
    let alone = open_ram_device(&rt, "ram:1m", Access::Exclusive).unwrap();
    let read = block_on(alone.read(4, alone.buffer(512).unwrap())).unwrap();
    assert_eq!(read.to_vec(), [0; 512], "the device was closed, and this is another");
}

#[test]
fn device_open_read_only_is_exported_read_only() {
    let rt = test_runtime();
    let device = open_ram_device(&rt, "ram:1m", Access::ReadOnly).unwrap();
    let server = block_on(rt.serve(Export::nvme_tcp(LOCAL).namespace(device))).unwrap();
    let host = open_ram_device(&rt, &server.uris()[0], Access::ReadWrite).unwrap();
    let buffer = block_on(host.read(0, host.buffer(512).unwrap())).unwrap();
    assert!(block_on(host.write(0, buffer)).is_err());
    // A writer of the program may be beside the export.
    let writer = open_ram_device(&rt, "ram:1m", Access::ReadWrite).unwrap();
    check_write_is_read_by_other(6, &writer, &host);
}

#[test]
fn each_namespace_is_its_own_device() {
    let rt = test_runtime();
    let [one, two] =
        ["ram:1m", "ram:2m"].map(|uri| open_ram_device(&rt, uri, Access::Exclusive).unwrap());
    let nqn = "nqn.2014-08.org.example:disks";
    let export = Export::nvme_tcp(LOCAL).nqn(nqn).namespace(one.clone()).namespace(two.clone());
    let server = block_on(rt.serve(export)).unwrap();
    let [address] = server.addresses() else { panic!("{:?}", server.addresses()) };
    assert_ne!(address.parse::<std::net::SocketAddr>().unwrap().port(), 0);
    let uris = [1, 2].map(|nsid| format!("tcp://{address}/{nqn}?ns={nsid}"));
    assert_eq!(server.uris(), uris);
    let hosts = uris.map(|uri| open_ram_device(&rt, &uri, Access::ReadWrite).unwrap());
    assert_eq!(hosts.each_ref().map(|host| host.limits().block_count), [2048, 4096]);
    check_write_is_read_by_other(7, &hosts[0], &one);
    check_write_is_read_by_other(8, &two, &hosts[1]);
}

#[test]
fn host_that_is_not_allowed_is_rejected() {
    let rt = test_runtime();
    let device = open_ram_device(&rt, "ram:1m", Access::ReadWrite).unwrap();
    let allowed = "nqn.2014-08.org.example:client";
    let export = Export::nvme_tcp(LOCAL).namespace(device).allow_host(allowed);
    let server = block_on(rt.serve(export)).unwrap();
    let uri = &server.uris()[0];
    let other = format!("{uri}&hostnqn=nqn.2014-08.org.example:other");
    assert!(open_ram_device(&rt, &other, Access::ReadWrite).is_err());
    open_ram_device(&rt, &format!("{uri}&hostnqn={allowed}"), Access::ReadWrite).unwrap();
}

#[test]
fn dropped_or_stopped_server_frees_its_address_and_disconnects_hosts() {
    let rt = test_runtime();
    let device = open_ram_device(&rt, "ram:1m", Access::ReadWrite).unwrap();
    let mut address = LOCAL.to_owned();
    for _ in 0..2 {
        let export = Export::nvme_tcp(address.as_str()).namespace(device.clone());
        let server = block_on(rt.serve(export)).unwrap();
        address.clone_from(&server.addresses()[0]);
        let uri = format!("{}&{IMPATIENT}", server.uris()[0]);
        let host = open_ram_device(&rt, &uri, Access::ReadWrite).unwrap();
        check_write_is_read_by_other(9, &device, &host);
        block_on(server.stop());
        assert!(block_on(host.read(0, host.buffer(512).unwrap())).is_err());
        block_on(host.close());
    }
    let server = block_on(rt.serve(Export::nvme_tcp(address.as_str()).namespace(device))).unwrap();
    drop(server);
    while TcpListener::bind(&address).is_err() {
        tenmil_linux::named_thread::yield_cpu();
    }
}

#[test]
fn closed_or_foreign_device_is_not_exported() {
    let (rt, other) = (test_runtime(), test_runtime());
    let device = open_ram_device(&other, "ram:1m", Access::ReadWrite).unwrap();
    let error = serve_error(&rt, Export::nvme_tcp(LOCAL).namespace(device.clone()));
    let said = "serve NVMe/TCP at 127.0.0.1:0: ram:1m was opened by another runtime, expected the one \
                that serves it";
    assert_eq!((error.category, error.text.as_str()), (ErrorCategory::Usage, said));
    drop(other);
    let error = serve_error(&rt, Export::nvme_tcp(LOCAL).namespace(device));
    let said = "serve NVMe/TCP at 127.0.0.1:0: ram:1m is closed, expected an open device";
    assert_eq!(error.text, said);
    assert!(error.hint.is_some());
}

#[test]
fn used_or_invalid_address_is_rejected() {
    let rt = test_runtime();
    let device = || open_ram_device(&rt, "null:", Access::ReadOnly).unwrap();
    let held = TcpListener::bind(LOCAL).unwrap();
    let address = held.local_addr().unwrap().to_string();
    let error = serve_error(&rt, Export::nvme_tcp(address.as_str()).namespace(device()));
    let said = format!("serve NVMe/TCP at {address}: the address is in use, expected a free one");
    assert_eq!((error.category, error.text), (ErrorCategory::Usage, said));
    for address in ["", "localhost", "127.0.0.1", "4420"] {
        let error = serve_error(&rt, Export::nvme_tcp(address).namespace(device()));
        assert!(
            error.text.ends_with("is no address, expected one such as 127.0.0.1:4420"),
            "{error}"
        );
    }
}

#[test]
fn export_beyond_loopback_requires_allowed_hosts_or_any() {
    let rt = test_runtime();
    let device = open_ram_device(&rt, "ram:1m", Access::ReadWrite).unwrap();
    let beyond = || Export::nvme_tcp("0.0.0.0:0").namespace(device.clone());
    let error = serve_error(&rt, beyond());
    assert!(error.text.contains("without authentication, expected allowed hosts"), "{error}");
    assert!(error.hint.is_some_and(|hint| hint.contains("allow_host")));
    block_on(rt.serve(beyond().allow_any_host())).unwrap();
    block_on(rt.serve(beyond().allow_host("nqn.2014-08.org.example:client"))).unwrap();
    let both = beyond().allow_any_host().allow_host("nqn.2014-08.org.example:client");
    assert!(serve_error(&rt, both).text.ends_with("expected one of them"));
    let nbd = Export::nbd("0.0.0.0:0").device("disk", device);
    assert!(serve_error(&rt, nbd).text.contains("could write without authentication"));
}

#[test]
fn invalid_export_is_rejected_by_name() {
    let rt = test_runtime();
    let device = || open_ram_device(&rt, "null:", Access::ReadOnly).unwrap();
    for (export, said) in [
        (Export::nvme_tcp(LOCAL), "there is no namespace, expected at least one"),
        (Export::nvme_tcp(LOCAL).nqn("disk").namespace(device()), "`disk`: "),
        (Export::nvme_tcp(LOCAL).allow_host("").namespace(device()), "``: "),
        (
            Export::nvme_tcp(LOCAL).allow_host("foo").namespace(device()),
            "`foo`: NQN does not begin with nqn.YYYY-MM.",
        ),
        (Export::nvme_tcp(LOCAL).device("disk", device()), "a named device was added"),
        (Export::nbd(LOCAL), "there are 0 devices, expected one"),
        (Export::nbd(LOCAL).namespace(device()), "a namespace was added"),
        (Export::nbd(LOCAL).nqn("x").device("disk", device()), "an NQN was set"),
        (Export::nbd("disk.sock").device("disk", device()), "`disk.sock` is no address"),
    ] {
        let error = serve_error(&rt, export);
        assert!(error.text.contains(said), "{error}, expected {said}");
        assert_eq!(error.category, ErrorCategory::Usage);
    }
}

#[test]
fn server_ends_with_its_runtime() {
    let rt = test_runtime();
    let device = open_ram_device(&rt, "ram:1m", Access::ReadWrite).unwrap();
    let server = block_on(rt.serve(Export::nvme_tcp(LOCAL).namespace(device))).unwrap();
    let host = test_runtime();
    let uri = format!("{}&{IMPATIENT}", server.uris()[0]);
    let host_device = open_ram_device(&host, &uri, Access::ReadWrite).unwrap();
    drop(rt);
    let read = block_on(host_device.read(0, host_device.buffer(512).unwrap()));
    assert!(read.is_err(), "the runtime of the server is gone");
    block_on(server.stop());
}

/// With `nbdinfo` of libnbd as the client.
#[test]
fn nbd_clients_prove_by_tls_that_they_may_connect() {
    let rt = test_runtime();
    let device = open_ram_device(&rt, "ram:1m", Access::ReadWrite).unwrap();
    let export = |tls| Export::nbd("0.0.0.0:0").device("disk", device.clone()).nbd_tls(tls);
    let text = |tls| serve_error(&rt, export(tls)).text;
    assert!(text(NbdTls::new()).contains("neither a certificate nor a pre-shared key"));
    assert!(text(NbdTls::new().psk("a", &[1; 32]).client_ca(b"")).contains("and no certificate"));
    let open = NbdTls::new().psk("a", &[1; 32]).allow_plaintext();
    assert!(text(open).contains("could write without authentication"));
    let any = NbdTls::new().certificate(b"chain", b"key");
    assert!(text(any).contains("could write without authentication"));
    let tls = NbdTls::new().psk("alice", &[0x5a; 32]);
    if !tenmil_serve::HAS_TLS {
        assert!(text(tls).contains("without the feature `tls`"));
        return;
    }
    let server = block_on(rt.serve(export(tls))).unwrap();
    let port = server.addresses()[0].rsplit(':').next().unwrap().to_owned();
    assert!(server.uris()[0].starts_with("nbds://"), "{:?}", server.uris());
    let directory = tempfile::tempdir().unwrap();
    let keys = directory.path().join("keys.psk");
    let lines = format!("alice:{}\nbob:{}\n", "5a".repeat(32), "a5".repeat(32));
    std::fs::write(&keys, lines).unwrap();
    let is_served = |name: &str| {
        let uri = format!("nbds://{name}@127.0.0.1:{port}/disk?tls-psk-file={}", keys.display());
        let output = std::process::Command::new("nbdinfo").args(["--size", &uri]).output();
        output.map(|output| output.status.success())
    };
    let Ok(is_alice_served) = is_served("alice") else {
        println!("skipped: there is no nbdinfo");
        return;
    };
    assert!(is_alice_served && !is_served("bob").unwrap());
    assert!(server.replace_nbd_tls(&NbdTls::new().certificate(b"chain", b"key")).is_err());
    server.replace_nbd_tls(&NbdTls::new().psk("bob", &[0xa5; 32])).unwrap();
    assert!(is_served("bob").unwrap() && !is_served("alice").unwrap());
    block_on(server.stop());
}

#[test]
fn nbd_export_shares_the_claim_and_ends_with_its_server() {
    let rt = test_runtime();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk.sock");
    let device = open_ram_device(&rt, "ram:1m", Access::ReadWrite).unwrap();
    let export = Export::nbd(path.display().to_string()).device("a disk", device);
    let server = block_on(rt.serve(export)).unwrap();
    assert_eq!(server.addresses(), [path.display().to_string()]);
    assert_eq!(server.uris(), [format!("nbd+unix:///a%20disk?socket={}", path.display())]);
    let mut client = UnixStream::connect(&path).unwrap();
    let mut greeting = [0; 18];
    std::io::Read::read_exact(&mut client, &mut greeting).unwrap();
    assert_eq!(&greeting[..16], b"NBDMAGICIHAVEOPT");
    assert!(open_ram_device(&rt, "ram:1m", Access::ReadWrite).is_err());
    block_on(server.stop());
    assert!(!path.exists());
    assert_eq!(std::io::Read::read(&mut client, &mut greeting).unwrap(), 0, "it is disconnected");
    open_ram_device(&rt, "ram:1m", Access::Exclusive).unwrap();
}
