//! Tests of the order in which keys are offered, against servers that look at the first identity only.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use tenmil_base::{Instant, Span, Stream, StreamError};
use tenmil_dma::RegionTable;
use tenmil_linux::socket::{SocketOptions, SocketStreamFactory};
use tenmil_nvme_fabrics::{Connector, Options, PendingConnect};
use tenmil_tls::{Psk, PskSource, ServerConfig, TlsSession, TlsStream};

use super::TlsConnector;
use crate::tcp::security::DeviceKeys;
use crate::tcp::security::tests::{HOST, NQN, remove_key, security_of, store_psk};

/// Opens socket pairs, and keeps the ends of the server.
struct SocketPairs {
    sockets: SocketStreamFactory,
    servers: Arc<Mutex<Vec<OwnedFd>>>,
}

struct OpenSocket(Option<Box<dyn Stream>>);

/// Keys of a server for one handshake: only the first identity is looked at, as GnuTLS does.
struct FirstIdentity {
    known: Vec<Psk>,
    first: Mutex<Option<String>>,
    was_asked: AtomicBool,
}

/// A server, and the client that is tested.
struct Rig {
    connector: TlsConnector,
    keys: DeviceKeys,
    servers: Arc<Mutex<Vec<OwnedFd>>>,
    regions: RegionTable,
    known: Vec<Psk>,
    /// First identity of each handshake so far.
    offered_first: Vec<String>,
}

const NOW: Instant = Instant { ns: 1_000_000_000 };

impl Connector for SocketPairs {
    fn begin_connect(&mut self, _: Instant, _: Instant) -> Box<dyn PendingConnect> {
        let (near, far) = UnixStream::pair().unwrap();
        self.servers.lock().unwrap().push(far.into());
        Box::new(OpenSocket(Some(self.sockets.new_stream(near.into()).unwrap())))
    }

    fn peer(&self) -> String {
        "a socket pair".to_owned()
    }
}

impl PendingConnect for OpenSocket {
    fn poll(&mut self, _: Instant) -> Option<Result<Box<dyn Stream>, StreamError>> {
        self.0.take().map(Ok)
    }
}

impl PskSource for FirstIdentity {
    fn find_psks(&self, identity: &[u8]) -> Vec<Psk> {
        if self.was_asked.swap(true, Ordering::Relaxed) {
            return Vec::new();
        }
        *self.first.lock().unwrap() = Some(String::from_utf8(identity.to_vec()).unwrap());
        self.known.iter().filter(|psk| psk.identity == identity).cloned().collect()
    }
}

impl Rig {
    /// A device with these options, and a server that knows the keys with these identities of it.
    fn new(query: &str, is_known: impl Fn(&str) -> bool) -> Self {
        let options = Options::new(NQN, HOST, [1; 16]);
        let security = security_of(query).unwrap();
        let keys = DeviceKeys::look_up(format!("tcp://{query}"), &security, &options).unwrap();
        let regions = RegionTable::new(1);
        let sockets = SocketStreamFactory::new(regions.clone(), SocketOptions::default());
        let servers = Arc::default();
        let below = Box::new(SocketPairs { sockets, servers: Arc::clone(&servers) });
        let connector = TlsConnector::new(below, keys.clone(), &regions);
        let known = keys.tls_psks().into_iter().filter(|psk| is_known(&psk.identity));
        let known = known.map(Psk::from).collect();
        Self { connector, keys, servers, regions, known, offered_first: Vec::new() }
    }

    /// Identities of the device, the preferred ones first.
    fn identities(&self) -> Vec<String> {
        self.keys.tls_psks().into_iter().map(|psk| psk.identity).collect()
    }

    /// Connects with servers for each stream.
    fn connect(&mut self, until: Instant) -> Result<Box<dyn Stream>, StreamError> {
        let mut connecting = self.connector.begin_connect(NOW, until);
        for _ in 0..64 {
            let (mut stream, source) = match self.servers.lock().unwrap().pop() {
                Some(socket) => self.server(socket),
                None => match connecting.poll(NOW) {
                    Some(result) => return result,
                    None => continue,
                },
            };
            for _ in 0..64 {
                let result = connecting.poll(NOW);
                // Its alert, or its answer, is sent by the next call.
                let _ = (stream.poll_handshake(), stream.receive());
                if result.is_some() || !self.servers.lock().unwrap().is_empty() {
                    self.offered_first.extend(source.first.lock().unwrap().take());
                    match result {
                        Some(result) => return result,
                        None => break,
                    }
                }
            }
        }
        panic!("neither connected nor refused, after {:?}", self.offered_first);
    }

    fn server(&self, socket: OwnedFd) -> (TlsStream, Arc<FirstIdentity>) {
        let source = Arc::new(FirstIdentity {
            known: self.known.clone(),
            first: Mutex::default(),
            was_asked: AtomicBool::new(false),
        });
        let config = ServerConfig::with_psks(Arc::clone(&source) as Arc<dyn PskSource>).unwrap();
        let sockets = SocketStreamFactory::new(self.regions.clone(), SocketOptions::default());
        let stream = sockets.new_stream(socket).unwrap();
        let session = TlsSession::server(&config).unwrap();
        (TlsStream::new(stream, session, self.regions.clone()), source)
    }
}

fn later() -> Instant {
    NOW.after(Span::from_secs(10))
}

#[test]
fn keys_are_offered_one_by_one_after_a_refusal_and_the_accepted_one_comes_first_later() {
    store_psk("one-by-one-256", 32);
    store_psk("one-by-one-384", 48);
    let query = "key=one-by-one-256,one-by-one-384";
    let mut rig = Rig::new(query, |identity| identity.starts_with("NVMe0R02"));
    let identities = rig.identities();
    assert_eq!((identities.len(), identities[2].starts_with("NVMe0R02")), (4, true));

    let stream = rig.connect(later()).unwrap();
    let channel = stream.secure_channel().unwrap();
    assert_eq!(channel.psk_identity.as_deref(), Some(&*identities[2]));
    // The first handshake offers all, of which the server sees the first; the others offer one each.
    assert_eq!(rig.offered_first, identities[..3]);

    rig.offered_first.clear();
    rig.connect(later()).unwrap();
    assert_eq!(rig.offered_first, identities[2..3], "the accepted key comes first");

    // A server that knows another one only: the others follow in their order.
    rig.known = rig.keys.tls_psks().drain(3..).map(Psk::from).collect();
    rig.offered_first.clear();
    rig.connect(later()).unwrap();
    let expected = [2, 0, 1, 3].map(|index: usize| identities[index].clone());
    assert_eq!(rig.offered_first, expected);
}

#[test]
fn refusal_of_all_keys_names_all_and_ends_at_the_deadline() {
    store_psk("refused-256", 32);
    let mut rig = Rig::new("key=refused-256", |_| false);
    let identities = rig.identities();
    let refused = rig.connect(later()).err().unwrap().to_string();
    assert!(identities.iter().all(|identity| refused.contains(identity)), "{refused}");
    assert!(refused.contains("derivation=libnvme-1.13"), "{refused}");
    assert_eq!(rig.offered_first, identities);

    rig.offered_first.clear();
    assert!(rig.connect(NOW).is_err());
    assert_eq!(rig.offered_first, identities[..1], "no time is left for the second");
}

#[test]
fn refused_keys_are_looked_up_again_for_the_next_connect() {
    store_psk("replaced", 32);
    let mut rig = Rig::new("key=replaced&tls-identity=1", |_| false);
    let await_lookup = |keys: &DeviceKeys| {
        while keys.is_lookup_in_progress() {
            tenmil_linux::named_thread::yield_cpu();
        }
    };
    let old = rig.identities();
    // A keyring that cannot be read: the keys stay.
    remove_key("replaced");
    rig.connect(later()).err().unwrap();
    await_lookup(&rig.keys);
    assert_eq!(rig.identities(), old);
    // The target has the new key, and the host gets it under the same name.
    store_psk("replaced", 48);
    rig.connect(later()).err().unwrap();
    await_lookup(&rig.keys);
    let new = rig.identities();
    assert_ne!(new, old);
    rig.known = rig.keys.tls_psks().into_iter().map(Psk::from).collect();
    let stream = rig.connect(later()).unwrap();
    assert_eq!(stream.secure_channel().unwrap().psk_identity.as_ref(), new.first());
}
