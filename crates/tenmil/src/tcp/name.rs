//! SSDs behind a network by name.
//!
//! ```text
//!   tcp://192.0.2.7:4420/nqn.2024-01.example:disk?ns=1
//!   tcp://[2001:db8::7]:4420/nqn.2024-01.example:disk?hdgst=yes&ddgst=yes
//!   tcp://192.0.2.7:4420,198.51.100.7:4420/nqn.2024-01.example:disk?spread=round-robin
//! ```

use base::Span;
use block::uri::{Uri, UriError};
use host::machine::Machine;
use host::socket::{SocketEngine, SocketOptions};
use remote::{Cache, DigestUse, Options, PATHS_MAX, Policy, Spread};

use super::maps::Maps;
use super::sockets;
use crate::Refused;

/// What a `tcp://` URI says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TcpName {
    /// `HOST:PORT`, of the first path.
    pub address: String,
    /// Of the other paths to the same namespace.
    pub others: Vec<String>,
    /// How requests are spread over paths that lead equally well.
    pub spread: Spread,
    /// Whose the volatile caches are that writes over several paths go through.
    pub cache: Cache,
    /// Which kinds of requests have connections of their own.
    pub maps: Maps,
    /// The namespace.
    pub namespace: u32,
    /// Commands in flight on each queue.
    pub depth: u32,
    /// I/O queues that the controller is asked for.
    pub queues: u16,
    /// Who is called, who calls, and what is agreed upon.
    pub options: Options,
    /// How its sockets are made.
    pub sockets: SocketOptions,
}

const DEPTH: u64 = 128;
const DEPTH_MAX: u64 = 1023;
const QUEUES: u64 = 32;
const QUEUES_MAX: u64 = 1024;

/// Words for yes and no.
const DIGESTS: [(&str, DigestUse); 2] = [("no", DigestUse::Off), ("yes", DigestUse::Required)];

pub(super) const YES_OR_NO: [(&str, bool); 2] = [("no", false), ("yes", true)];

/// What a machine's own name is made from, so that its number is not told to everybody.
const SALT: u64 = 0x7465_6e6d_696c_0001;
const DISCOVERY_SALT: u64 = 0x7465_6e6d_696c_0002;

impl TcpName {
    /// What stands before the colon.
    pub const SCHEME: &str = "tcp";

    /// What `uri` says, whose scheme is [`SCHEME`](Self::SCHEME).
    ///
    /// # Errors
    ///
    /// If it names no SSD.
    pub fn of(uri: &Uri) -> Result<Self, UriError> {
        let expected =
            "expected tcp://HOST:PORT/NQN, such as tcp://127.0.0.1:4420/nqn.2024-01.example:disk";
        let rest = uri.path().strip_prefix("//").unwrap_or("");
        let (address, subsystem) = rest.split_once('/').unwrap_or((rest, ""));
        if address.is_empty() || subsystem.is_empty() {
            return Err(uri.refuse(format!("no subsystem at `{}`, {expected}", uri.path())));
        }
        let mut name = Self::at(address, subsystem);
        let mut addresses = address.split(',').map(str::to_owned);
        name.address = addresses.next().unwrap_or_default();
        name.others = addresses.collect();
        check_paths(&name).map_err(|problem| uri.refuse(problem))?;
        let mut fields = uri.fields();
        let small = |number: Option<u64>| number.and_then(|number| u32::try_from(number).ok());
        let namespace = fields.number("ns", 1..=u64::from(u32::MAX - 1))?;
        name.namespace = small(namespace).unwrap_or(1);
        let depth = fields.number("depth", 1..=DEPTH_MAX)?.or(Some(DEPTH));
        name.depth = small(depth).unwrap_or(1);
        let queues = fields.number("queues", 1..=QUEUES_MAX)?.unwrap_or(QUEUES);
        name.queues = u16::try_from(queues).unwrap_or(1);
        name.maps.read = fields.choice("read-queue", &YES_OR_NO)?.unwrap_or(false);
        name.maps.poll = fields.choice("poll-queue", &YES_OR_NO)?.unwrap_or(false);
        let spread = fields.choice("spread", &Spread::NAMES)?;
        let cache = fields.choice("cache", &Cache::NAMES)?;
        for (key, is_given) in [("spread", spread.is_some()), ("cache", cache.is_some())] {
            if is_given && name.others.is_empty() {
                let expected = "expected tcp://HOST:PORT,HOST:PORT/NQN";
                return Err(uri.refuse(format!("{key} is for several paths, {expected}")));
            }
        }
        name.spread = spread.unwrap_or_default();
        name.cache = cache.unwrap_or_default();
        let options = &mut name.options;
        if let Some(digest) = fields.choice("hdgst", &DIGESTS)? {
            options.header_digest = digest;
        }
        if let Some(digest) = fields.choice("ddgst", &DIGESTS)? {
            options.data_digest = digest;
        }
        if let Some(direct) = fields.choice("direct", &YES_OR_NO)? {
            options.direct = direct;
        }
        if let Some(host) = fields.text("host") {
            // A host identifier belongs to one host NQN (Base 2.1 §5.1.25.1.28).
            options.host_id = host_id_of(&host);
            options.host = host;
        }
        let policy = &mut options.policy;
        for (key, span) in times(policy) {
            if let Some(time) = fields.time(key)? {
                *span = time;
            }
        }
        check(policy).map_err(|problem| uri.refuse(problem))?;
        name.sockets = sockets::of(uri, &mut fields)?;
        fields.finish()?;
        name.options.check().map_err(|problem| uri.refuse(problem.to_string()))?;
        Ok(name)
    }

    /// A subsystem at an address, with nothing out of the ordinary.
    #[must_use]
    pub fn at(address: &str, subsystem: &str) -> Self {
        let host_id = host_id();
        Self {
            address: address.to_owned(),
            others: Vec::new(),
            spread: Spread::default(),
            cache: Cache::default(),
            maps: Maps::default(),
            namespace: 1,
            depth: 128,
            queues: 32,
            options: Options::new(subsystem, &host_name(&host_id), host_id),
            sockets: SocketOptions::default(),
        }
    }
}

impl TcpName {
    /// The same namespace by its first path and one short queue.
    pub(super) fn to_one_queue(&self) -> Self {
        let (others, maps) = (Vec::new(), Maps::default());
        Self { others, maps, depth: 4, queues: 1, ..self.clone() }
    }

    /// Where all the paths begin.
    pub fn addresses(&self) -> impl Iterator<Item = &str> {
        core::iter::once(&self.address).chain(&self.others).map(String::as_str)
    }

    /// As [`Medium::takes_lent`](base::Medium::takes_lent): sockets take data wherever they lie.
    pub(super) fn takes_lent(&self) -> Result<u32, String> {
        if self.options.data_digest != DigestUse::Off {
            return Err("its data have a digest, which is computed in memory of this process, \
                        expected none"
                .to_owned());
        }
        match self.sockets.engine {
            SocketEngine::Epoll => Ok(1),
            SocketEngine::Ring => Err("its sockets go by io_uring, expected epoll".to_owned()),
        }
    }
}

/// Whether the paths are some.
fn check_paths(name: &TcpName) -> Result<(), String> {
    let addresses: Vec<&str> = name.addresses().collect();
    for (index, address) in addresses.iter().enumerate() {
        if address.is_empty() {
            return Err("a path has no address, expected HOST:PORT,HOST:PORT".to_owned());
        }
        if addresses[..index].contains(address) {
            return Err(format!("{address} is given twice, expected each path once"));
        }
    }
    if addresses.len() > PATHS_MAX {
        return Err(format!("{} paths are given, expected at most {PATHS_MAX}", addresses.len()));
    }
    Ok(())
}

/// The words of a policy, as they appear in URIs and where they are printed.
pub(crate) fn times(policy: &mut Policy) -> [(&'static str, &mut Span); 5] {
    [
        ("detect", &mut policy.detect),
        ("connect", &mut policy.connect),
        ("retry", &mut policy.retry),
        ("fail-fast", &mut policy.fail_fast),
        ("give-up", &mut policy.give_up),
    ]
}

/// What each of them is good for.
pub(crate) const MEANINGS: [(&str, &str); 5] = [
    (
        "detect",
        "a peer that is silent is noticed within this time (keep-alive); a write that was cut off is \
         sent again after 2 or 3 times that, and the controller's quiesce time",
    ),
    ("connect", "each try to connect may take so long"),
    ("retry", "from one try to the next"),
    ("fail-fast", "requests are held for so long, and fail from then on"),
    ("give-up", "nobody tries any more: the device is gone"),
];

fn check(policy: &Policy) -> Result<(), String> {
    let (least, most) = (Span::from_ms(100), Span::from_secs(8 * 3600));
    for (key, span) in times(&mut policy.clone()) {
        if !(least..=most).contains(span) {
            return Err(format!("{key} is {span}, expected {least} to 8 hours"));
        }
    }
    Ok(())
}

/// This machine's discovery service at these addresses: a name that no other has, the same each time,
/// and a number.
pub(crate) fn discovery_name(addresses: &str) -> (String, String) {
    let salt = addresses
        .bytes()
        .fold(DISCOVERY_SALT, |salt, byte| base::Random::new(salt ^ u64::from(byte)).draw());
    let id = machine_id(salt);
    let serial = id.iter().take(10).map(|byte| format!("{byte:02x}")).collect();
    (host_name(&id), serial)
}

/// This machine as a host.
fn host_id() -> [u8; 16] {
    machine_id(SALT)
}

/// The identifier of a host that goes by another NQN on this machine: the same each time.
fn host_id_of(nqn: &str) -> [u8; 16] {
    machine_id(
        nqn.bytes().fold(SALT, |salt, byte| base::Random::new(salt ^ u64::from(byte)).draw()),
    )
}

/// This machine as a number: the same each time, and not the one that others may know it by.
fn machine_id(salt: u64) -> [u8; 16] {
    let text = Machine::this().text("/etc/machine-id").unwrap_or_default();
    let digits =
        |at: usize| text.get(at..at + 16).and_then(|part| u64::from_str_radix(part, 16).ok());
    let (first, second) = (digits(0).unwrap_or(1), digits(16).unwrap_or(2));
    let mut random = base::Random::new(first ^ salt);
    let mut mixed = base::Random::new(second ^ random.draw());
    let mut id = [0; 16];
    id[..8].copy_from_slice(&mixed.draw().to_le_bytes());
    id[8..].copy_from_slice(&(mixed.draw() ^ random.draw()).to_le_bytes());
    // A random UUID, as RFC 9562 marks it.
    id[6] = id[6] & 0x0f | 0x40;
    id[8] = id[8] & 0x3f | 0x80;
    id
}

/// The number as an NQN.
fn host_name(id: &[u8; 16]) -> String {
    let hex: String = id.iter().map(|byte| format!("{byte:02x}")).collect();
    let parts = [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]];
    format!("{}{}", wire::nqn::UUID_PREFIX, parts.join("-"))
}

/// One word of a policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PolicyRow {
    /// The word, as it appears in a URI.
    pub(crate) key: &'static str,
    pub(crate) span: Span,
    pub(crate) meaning: &'static str,
}

/// The policy that `uri` asks for; without one, the defaults.
pub(crate) fn policy_of(uri: Option<&str>) -> Result<Vec<PolicyRow>, Refused> {
    let mut policy = match uri {
        None => Policy::default(),
        Some(text) => {
            let uri: Uri = text.parse()?;
            if uri.scheme() != TcpName::SCHEME {
                let problem = "only a device behind a network has a policy, expected tcp://…";
                return Err(uri.refuse(problem).into());
            }
            TcpName::of(&uri)?.options.policy
        }
    };
    let rows = times(&mut policy).into_iter().zip(MEANINGS);
    Ok(rows.map(|((key, span), (_, meaning))| PolicyRow { key, span: *span, meaning }).collect())
}
