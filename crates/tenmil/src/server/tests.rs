//! Servers: what is exported, to whom, by which claim, and until when.

#![allow(clippy::disallowed_methods, reason = "a test takes addresses that servers want")]

use std::net::TcpListener;
use std::os::unix::net::UnixStream;

use smol::block_on;
use tenmil_base::{Error, ErrorCategory};

use crate::access::Access;
use crate::device::Device;
use crate::export::Export;
use crate::runtime::Runtime;

const LOCAL: &str = "127.0.0.1:0";

/// A host that gives its target up soon.
const IMPATIENT: &str = "reconnect-delay=100ms&fast-io-fail-timeout=100ms&ctrl-loss-timeout=300ms";

fn runtime() -> Runtime {
    let core = tenmil_linux::CpuList::allowed().iter().next();
    Runtime::builder().cores(core).pin(false).start().unwrap()
}

fn open(rt: &Runtime, uri: &str, access: Access) -> Result<Device, Error> {
    block_on(rt.open(uri, access))
}

fn refused(rt: &Runtime, export: Export) -> Error {
    block_on(rt.serve(export)).unwrap_err()
}

/// Writes a block through one handle and reads it through the other.
fn passes(byte: u8, from: &Device, to: &Device) {
    let mut buffer = from.buffer(512).unwrap();
    buffer.store(0, &[byte; 512]);
    block_on(from.write(u64::from(byte), buffer)).unwrap();
    let read = block_on(to.read(u64::from(byte), to.buffer(512).unwrap())).unwrap();
    assert_eq!(read.to_vec(), [byte; 512]);
}

#[test]
fn a_host_and_the_program_share_the_device_that_is_exported() {
    let rt = runtime();
    let device = open(&rt, "ram:1m", Access::ReadWrite).unwrap();
    let server = rt.serve(Export::nvme_tcp(LOCAL).namespace(device.clone()));
    let server = block_on(server).unwrap();
    let host = open(&rt, &server.uris()[0], Access::ReadWrite).unwrap();
    passes(3, &device, &host);
    passes(4, &host, &device);
    // The claim stays with the export when the program drops its handle.
    drop(device);
    let other = open(&rt, "ram:1m", Access::ReadWrite).unwrap_err();
    assert!(other.text.contains("it is open read-write in this runtime"), "{other}");
    let reader = open(&rt, "ram:1m", Access::ReadOnly).unwrap();
    passes(5, &host, &reader);
    block_on(host.close());
    block_on(reader.close());
    block_on(server.stop());
    let alone = open(&rt, "ram:1m", Access::Exclusive).unwrap();
    let read = block_on(alone.read(4, alone.buffer(512).unwrap())).unwrap();
    assert_eq!(read.to_vec(), [0; 512], "the device was closed, and this is another");
}

#[test]
fn a_device_that_is_open_read_only_is_exported_read_only() {
    let rt = runtime();
    let device = open(&rt, "ram:1m", Access::ReadOnly).unwrap();
    let server = block_on(rt.serve(Export::nvme_tcp(LOCAL).namespace(device))).unwrap();
    let host = open(&rt, &server.uris()[0], Access::ReadWrite).unwrap();
    let buffer = block_on(host.read(0, host.buffer(512).unwrap())).unwrap();
    assert!(block_on(host.write(0, buffer)).is_err());
    // A writer of the program may be beside the export.
    let writer = open(&rt, "ram:1m", Access::ReadWrite).unwrap();
    passes(6, &writer, &host);
}

#[test]
fn each_namespace_is_a_device_of_its_own() {
    let rt = runtime();
    let [one, two] = ["ram:1m", "ram:2m"].map(|uri| open(&rt, uri, Access::Exclusive).unwrap());
    let nqn = "nqn.2014-08.org.example:disks";
    let export = Export::nvme_tcp(LOCAL).nqn(nqn).namespace(one.clone()).namespace(two.clone());
    let server = block_on(rt.serve(export)).unwrap();
    let [address] = server.addresses() else { panic!("{:?}", server.addresses()) };
    assert_ne!(address.parse::<std::net::SocketAddr>().unwrap().port(), 0);
    let uris = [1, 2].map(|nsid| format!("tcp://{address}/{nqn}?ns={nsid}"));
    assert_eq!(server.uris(), uris);
    let hosts = uris.map(|uri| open(&rt, &uri, Access::ReadWrite).unwrap());
    assert_eq!(hosts.each_ref().map(|host| host.limits().block_count), [2048, 4096]);
    passes(7, &hosts[0], &one);
    passes(8, &two, &hosts[1]);
}

#[test]
fn a_host_that_is_not_allowed_is_refused() {
    let rt = runtime();
    let device = open(&rt, "ram:1m", Access::ReadWrite).unwrap();
    let allowed = "nqn.2014-08.org.example:client";
    let export = Export::nvme_tcp(LOCAL).namespace(device).allow_host(allowed);
    let server = block_on(rt.serve(export)).unwrap();
    let uri = &server.uris()[0];
    let other = format!("{uri}&hostnqn=nqn.2014-08.org.example:other");
    assert!(open(&rt, &other, Access::ReadWrite).is_err());
    open(&rt, &format!("{uri}&hostnqn={allowed}"), Access::ReadWrite).unwrap();
}

#[test]
fn a_server_that_is_dropped_or_stopped_frees_its_address_and_disconnects_its_hosts() {
    let rt = runtime();
    let device = open(&rt, "ram:1m", Access::ReadWrite).unwrap();
    let mut address = LOCAL.to_owned();
    for _ in 0..2 {
        let export = Export::nvme_tcp(address.as_str()).namespace(device.clone());
        let server = block_on(rt.serve(export)).unwrap();
        address.clone_from(&server.addresses()[0]);
        let uri = format!("{}&{IMPATIENT}", server.uris()[0]);
        let host = open(&rt, &uri, Access::ReadWrite).unwrap();
        passes(9, &device, &host);
        block_on(server.stop());
        assert!(block_on(host.read(0, host.buffer(512).unwrap())).is_err());
        block_on(host.close());
    }
    let server = block_on(rt.serve(Export::nvme_tcp(address.as_str()).namespace(device))).unwrap();
    drop(server);
    while TcpListener::bind(&address).is_err() {
        tenmil_linux::thread::yield_now();
    }
}

#[test]
fn a_device_that_is_closed_or_of_another_runtime_is_not_served() {
    let (rt, other) = (runtime(), runtime());
    let device = open(&other, "ram:1m", Access::ReadWrite).unwrap();
    let error = refused(&rt, Export::nvme_tcp(LOCAL).namespace(device.clone()));
    let said = "serve NVMe/TCP at 127.0.0.1:0: ram:1m was opened by another runtime, expected the one \
                that serves it";
    assert_eq!((error.category, error.text.as_str()), (ErrorCategory::Usage, said));
    drop(other);
    let error = refused(&rt, Export::nvme_tcp(LOCAL).namespace(device));
    let said = "serve NVMe/TCP at 127.0.0.1:0: ram:1m is closed, expected an open device";
    assert_eq!(error.text, said);
    assert!(error.hint.is_some());
}

#[test]
fn an_address_that_is_not_free_or_none_is_refused() {
    let rt = runtime();
    let device = || open(&rt, "null:", Access::ReadOnly).unwrap();
    let held = TcpListener::bind(LOCAL).unwrap();
    let address = held.local_addr().unwrap().to_string();
    let error = refused(&rt, Export::nvme_tcp(address.as_str()).namespace(device()));
    let said = format!("serve NVMe/TCP at {address}: the address is in use, expected a free one");
    assert_eq!((error.category, error.text), (ErrorCategory::Usage, said));
    for address in ["", "localhost", "127.0.0.1", "4420"] {
        let error = refused(&rt, Export::nvme_tcp(address).namespace(device()));
        assert!(
            error.text.ends_with("is no address, expected one such as 127.0.0.1:4420"),
            "{error}"
        );
    }
}

#[test]
fn an_export_beyond_loopback_names_its_hosts_or_says_that_any_may_connect() {
    let rt = runtime();
    let device = open(&rt, "ram:1m", Access::ReadWrite).unwrap();
    let beyond = || Export::nvme_tcp("0.0.0.0:0").namespace(device.clone());
    let error = refused(&rt, beyond());
    assert!(error.text.contains("without authentication, expected allowed hosts"), "{error}");
    assert!(error.hint.is_some_and(|hint| hint.contains("allow_host")));
    block_on(rt.serve(beyond().allow_any_host())).unwrap();
    block_on(rt.serve(beyond().allow_host("nqn.2014-08.org.example:client"))).unwrap();
    let both = beyond().allow_any_host().allow_host("nqn.2014-08.org.example:client");
    assert!(refused(&rt, both).text.ends_with("expected one of them"));
    let nbd = Export::nbd("0.0.0.0:0").device("disk", device);
    assert!(refused(&rt, nbd).text.contains("could write without authentication"));
}

#[test]
fn an_export_with_a_mistake_is_refused_by_name() {
    let rt = runtime();
    let device = || open(&rt, "null:", Access::ReadOnly).unwrap();
    for (export, said) in [
        (Export::nvme_tcp(LOCAL), "there is no namespace, expected at least one"),
        (Export::nvme_tcp(LOCAL).nqn("disk").namespace(device()), "`disk`: "),
        (Export::nvme_tcp(LOCAL).allow_host("").namespace(device()), "``: "),
        (Export::nvme_tcp(LOCAL).device("disk", device()), "a named device was added"),
        (Export::nbd(LOCAL), "there are 0 devices, expected one"),
        (Export::nbd(LOCAL).namespace(device()), "a namespace was added"),
        (Export::nbd(LOCAL).nqn("x").device("disk", device()), "an NQN was set"),
        (Export::nbd("disk.sock").device("disk", device()), "`disk.sock` is no address"),
    ] {
        let error = refused(&rt, export);
        assert!(error.text.contains(said), "{error}, expected {said}");
        assert_eq!(error.category, ErrorCategory::Usage);
    }
}

#[test]
fn a_server_ends_with_its_runtime() {
    let rt = runtime();
    let device = open(&rt, "ram:1m", Access::ReadWrite).unwrap();
    let server = block_on(rt.serve(Export::nvme_tcp(LOCAL).namespace(device))).unwrap();
    let host = runtime();
    let uri = format!("{}&{IMPATIENT}", server.uris()[0]);
    let host_device = open(&host, &uri, Access::ReadWrite).unwrap();
    drop(rt);
    let read = block_on(host_device.read(0, host_device.buffer(512).unwrap()));
    assert!(read.is_err(), "the runtime of the server is gone");
    block_on(server.stop());
}

#[test]
fn an_nbd_export_shares_the_claim_and_ends_with_its_server() {
    let rt = runtime();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk.sock");
    let device = open(&rt, "ram:1m", Access::ReadWrite).unwrap();
    let export = Export::nbd(path.display().to_string()).device("a disk", device);
    let server = block_on(rt.serve(export)).unwrap();
    assert_eq!(server.addresses(), [path.display().to_string()]);
    assert_eq!(server.uris(), [format!("nbd+unix:///a%20disk?socket={}", path.display())]);
    let mut client = UnixStream::connect(&path).unwrap();
    let mut greeting = [0; 18];
    std::io::Read::read_exact(&mut client, &mut greeting).unwrap();
    assert_eq!(&greeting[..16], b"NBDMAGICIHAVEOPT");
    assert!(open(&rt, "ram:1m", Access::ReadWrite).is_err());
    block_on(server.stop());
    assert!(!path.exists());
    assert_eq!(std::io::Read::read(&mut client, &mut greeting).unwrap(), 0, "it is disconnected");
    open(&rt, "ram:1m", Access::Exclusive).unwrap();
}
