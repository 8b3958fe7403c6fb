//! `tcp://` URIs.
//!
//! ```text
//!   tcp://192.0.2.7/nqn.2024-01.example:disk/1
//!   tcp://192.0.2.7:4420/nqn.2024-01.example:disk?ns=1      the same
//!   tcp://[2001:db8::7]:4420/nqn.2024-01.example:disk?hdgst=yes&ddgst=yes
//!   tcp://192.0.2.7:4420,198.51.100.7:4420/nqn.2024-01.example:disk?iopolicy=round-robin
//!   tcp://192.0.2.7/nqn.2024-01.example:disk/1?tls=required&key=NAME
//! ```

use tenmil_base::Span;
use tenmil_block::uri::{Uri, UriError};
use tenmil_linux::machine_identity_key::{MachineKey, MachineKeySource};
use tenmil_linux::socket::{SocketEngine, SocketOptions};
use tenmil_nvme_fabrics::{
    CacheScope, DigestMode, IoPolicy, Options, PATHS_MAX, SecureChannelMode, TimeoutPolicy,
};

use super::queues_by_type::QueueMapOptions;
use super::security::TcpSecurity;
use super::sockets;
use tenmil_base::Error;

/// Parsed `tcp://` URI.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TcpUri {
    /// `HOST:PORT` of the first path.
    pub address: String,
    /// `HOST:PORT` of the other paths to the same namespace.
    pub others: Vec<String>,
    /// I/O policy: how requests are distributed over paths of equal ANA state.
    pub io_policy: IoPolicy,
    /// Which controllers share a volatile write cache. Determines which losses make a flush fail.
    pub cache: CacheScope,
    /// Kinds of requests that have connections of their own.
    pub maps: QueueMapOptions,
    /// Namespace identifier.
    pub namespace: u32,
    /// Queue depth: commands in flight on each queue.
    pub depth: u32,
    /// Number of I/O queues requested from the controller.
    pub queues: u16,
    /// Subsystem and host NQN, digests, timeouts and other negotiated options.
    pub options: Options,
    /// Socket options.
    pub sockets: SocketOptions,
    /// TLS, authentication, and the names of their keys.
    pub security: TcpSecurity,
}

const DEPTH: u64 = 128;
const DEPTH_MAX: u64 = 1023;
const QUEUES: u64 = 32;
const QUEUES_MAX: u64 = 1024;

/// Values of `hdgst` and `ddgst`.
const DIGESTS: [(&str, DigestMode); 2] = [("no", DigestMode::Off), ("yes", DigestMode::Required)];

pub(super) const YES_OR_NO: [(&str, bool); 2] = [("no", false), ("yes", true)];

/// Salts for the identifiers derived from the machine's number, which is not to be disclosed itself
/// (machine-id(5)).
const SALT: u64 = 0x7465_6e6d_696c_0001;
const DISCOVERY_SALT: u64 = 0x7465_6e6d_696c_0002;

impl TcpUri {
    /// URI scheme.
    pub const SCHEME: &str = "tcp";

    /// Parses `uri`, whose scheme must be [`SCHEME`](Self::SCHEME).
    ///
    /// # Errors
    ///
    /// If the address or the subsystem is missing, or an option is invalid.
    pub fn from_uri(uri: &Uri) -> Result<Self, UriError> {
        let expected =
            "expected tcp://HOST:PORT/NQN/NSID, such as tcp://127.0.0.1/nqn.2024-01.example:disk/1";
        let rest = uri.path().strip_prefix("//").unwrap_or("");
        let (address, subsystem) = rest.split_once('/').unwrap_or((rest, ""));
        if address.is_empty() || subsystem.is_empty() {
            return Err(uri.error(format!("no subsystem at `{}`, {expected}", uri.path())));
        }
        let mut name = Self::with_default_options(address, subsystem);
        let mut addresses = address.split(',').map(str::to_owned);
        name.address = addresses.next().unwrap_or_default();
        name.others = addresses.collect();
        check_paths(&name).map_err(|problem| uri.error(problem))?;
        let mut fields = uri.options();
        let small = |number: Option<u64>| number.and_then(|number| u32::try_from(number).ok());
        let namespace = fields.number_value("ns", 1..=u64::from(u32::MAX - 1))?;
        name.namespace = small(namespace).unwrap_or(1);
        let depth = fields.number_value("depth", 1..=DEPTH_MAX)?.or(Some(DEPTH));
        name.depth = small(depth).unwrap_or(1);
        let queues = fields.number_value("queues", 1..=QUEUES_MAX)?.unwrap_or(QUEUES);
        name.queues = u16::try_from(queues).unwrap_or(1);
        name.maps.read = fields.choice_value("read-queue", &YES_OR_NO)?.unwrap_or(false);
        name.maps.poll = fields.choice_value("poll-queue", &YES_OR_NO)?.unwrap_or(false);
        let io_policy = fields.choice_value("iopolicy", &IoPolicy::NAMES)?;
        let cache = fields.choice_value("write-cache", &CacheScope::NAMES)?;
        for (key, is_given) in [("iopolicy", io_policy.is_some()), ("write-cache", cache.is_some())]
        {
            if is_given && name.others.is_empty() {
                let expected = "expected tcp://HOST:PORT,HOST:PORT/NQN";
                return Err(uri.error(format!("{key} is for several paths, {expected}")));
            }
        }
        name.io_policy = io_policy.unwrap_or_default();
        name.cache = cache.unwrap_or_default();
        let options = &mut name.options;
        if let Some(digest) = fields.choice_value("hdgst", &DIGESTS)? {
            options.header_digest = digest;
        }
        if let Some(digest) = fields.choice_value("ddgst", &DIGESTS)? {
            options.data_digest = digest;
        }
        if let Some(direct) = fields.choice_value("inline-send", &YES_OR_NO)? {
            options.direct = direct;
        }
        if let Some(host) = fields.text_value("hostnqn") {
            // A host identifier belongs to one host NQN (Base 2.1 §5.1.25.1.28).
            options.host_id = host_id_of(&host);
            options.host = host;
        }
        let policy = &mut options.policy;
        for (key, span) in timeouts_with_keys(policy) {
            if let Some(time) = fields.time_value(key)? {
                *span = time;
            }
        }
        check_timeouts_in_range(policy).map_err(|problem| uri.error(problem))?;
        name.sockets = sockets::socket_options(uri, &mut fields)?;
        name.security = TcpSecurity::from_options(uri, &mut fields)?;
        fields.reject_unconsumed()?;
        name.options.check_nqns().map_err(|problem| uri.error(problem.to_string()))?;
        Ok(name)
    }

    /// A subsystem at an address, with default options.
    #[must_use]
    pub fn with_default_options(address: &str, subsystem: &str) -> Self {
        let host_id = host_id();
        Self {
            address: address.to_owned(),
            others: Vec::new(),
            io_policy: IoPolicy::default(),
            cache: CacheScope::default(),
            maps: QueueMapOptions::default(),
            namespace: 1,
            depth: 128,
            queues: 32,
            options: Options::new(subsystem, &host_nqn_of_id(&host_id), host_id),
            sockets: SocketOptions::default(),
            security: TcpSecurity::default(),
        }
    }
}

impl TcpUri {
    /// The same namespace by its first path and one short queue.
    pub(super) fn to_one_queue(&self) -> Self {
        let (others, maps) = (Vec::new(), QueueMapOptions::default());
        Self { others, maps, depth: 4, queues: 1, ..self.clone() }
    }

    /// The device without its options, for messages.
    pub(super) fn device(&self) -> String {
        let addresses: Vec<&str> = self.addresses().collect();
        format!("tcp://{}/{}", addresses.join(","), self.options.subsystem)
    }

    /// Where all the paths begin.
    pub fn addresses(&self) -> impl Iterator<Item = &str> {
        core::iter::once(&self.address).chain(&self.others).map(String::as_str)
    }

    /// See [`Medium::supports_kernel_buffers`](tenmil_base::BlockDevice::supports_kernel_buffers): sockets send data from any memory.
    pub(super) fn supports_kernel_buffers(&self) -> Result<u32, Error> {
        if self.options.data_digest != DigestMode::Off {
            return Err(Error::environment(
                "its data have a digest, which is computed in memory of this process, \
                        expected none"
                    .to_owned(),
            ));
        }
        if self.security.tls != SecureChannelMode::Off {
            return Err(Error::environment(
                "its data are encrypted, in memory of this process, expected tls=off",
            ));
        }
        match self.sockets.engine {
            SocketEngine::Epoll => Ok(1),
            SocketEngine::IoUring => {
                Err(Error::environment("its sockets go by io_uring, expected epoll".to_owned()))
            }
        }
    }
}

/// Checks that no path is empty or given twice.
fn check_paths(name: &TcpUri) -> Result<(), Error> {
    let addresses: Vec<&str> = name.addresses().collect();
    for (index, address) in addresses.iter().enumerate() {
        if address.is_empty() {
            return Err(Error::environment(
                "a path has no address, expected HOST:PORT,HOST:PORT".to_owned(),
            ));
        }
        if addresses[..index].contains(address) {
            return Err(Error::environment(format!(
                "{address} is given twice, expected each path once"
            )));
        }
    }
    if addresses.len() > PATHS_MAX {
        return Err(Error::environment(format!(
            "{} paths are given, expected at most {PATHS_MAX}",
            addresses.len()
        )));
    }
    Ok(())
}

/// Timeouts of a policy with their URI keys.
pub(crate) fn timeouts_with_keys(policy: &mut TimeoutPolicy) -> [(&'static str, &mut Span); 5] {
    [
        ("keep-alive-timeout", &mut policy.detect),
        ("connect-timeout", &mut policy.connect),
        ("reconnect-delay", &mut policy.retry),
        ("fast-io-fail-timeout", &mut policy.fail_fast),
        ("ctrl-loss-timeout", &mut policy.give_up),
    ]
}

/// Descriptions of the timeouts.
pub(crate) const MEANINGS: [(&str, &str); 5] = [
    (
        "keep-alive-timeout",
        "a peer that is silent is noticed within this time (keep-alive); a write that was cut off is \
         sent again after 2 or 3 times that, and the controller's quiesce time",
    ),
    ("connect-timeout", "time limit of an attempt to connect"),
    ("reconnect-delay", "time between two attempts to connect"),
    ("fast-io-fail-timeout", "requests are held for this long, and fail from then on"),
    ("ctrl-loss-timeout", "reconnecting ends, and the device is removed"),
];

fn check_timeouts_in_range(policy: &TimeoutPolicy) -> Result<(), Error> {
    let (least, most) = (Span::from_ms(100), Span::from_secs(8 * 3600));
    for (key, span) in timeouts_with_keys(&mut policy.clone()) {
        if !(least..=most).contains(span) {
            return Err(Error::environment(format!(
                "{key} is {span}, expected {least} to 8 hours"
            )));
        }
    }
    Ok(())
}

/// NQN and serial number of the discovery service of this machine at these addresses. Stable across
/// restarts and unique.
pub fn discovery_nqn_and_serial(addresses: &str) -> (String, String) {
    let salt = addresses.bytes().fold(DISCOVERY_SALT, |salt, byte| {
        tenmil_base::Random::new(salt ^ u64::from(byte)).next_u64()
    });
    let id = salted_machine_id(salt);
    let serial = id.iter().take(10).map(|byte| format!("{byte:02x}")).collect();
    (host_nqn_of_id(&id), serial)
}

/// Host identifier of this machine.
fn host_id() -> [u8; 16] {
    salted_machine_id(SALT)
}

/// Host identifier of a host NQN on this machine: the machine's own, if the NQN is, and otherwise derived
/// from the machine's number and the NQN. Stable across restarts. Another machine with the same NQN is
/// another host for reservations.
fn host_id_of(nqn: &str) -> [u8; 16] {
    let own = host_id();
    if nqn == host_nqn_of_id(&own) {
        return own;
    }
    salted_machine_id(
        nqn.bytes()
            .fold(SALT, |salt, byte| tenmil_base::Random::new(salt ^ u64::from(byte)).next_u64()),
    )
}

/// Identifier derived from the machine's number and `salt`. Stable, and does not disclose that number.
fn salted_machine_id(salt: u64) -> [u8; 16] {
    let key = MachineKey::of_this_machine();
    static SHOW: std::sync::Once = std::sync::Once::new();
    SHOW.call_once(|| match &key.source {
        MachineKeySource::MachineId => {}
        source @ MachineKeySource::Process(_) => tracing::warn!("host identifier: {source}"),
        source => tracing::info!("host identifier: {source}"),
    });
    derive_host_id(key.value, salt)
}

fn derive_host_id(machine: u128, salt: u64) -> [u8; 16] {
    let half = |shift: u32| u64::try_from(machine >> shift & u128::from(u64::MAX)).unwrap_or(0);
    let (first, second) = (half(64), half(0));
    let mut random = tenmil_base::Random::new(first ^ salt);
    let mut mixed = tenmil_base::Random::new(second ^ random.next_u64());
    let mut id = [0; 16];
    id[..8].copy_from_slice(&mixed.next_u64().to_le_bytes());
    id[8..].copy_from_slice(&(mixed.next_u64() ^ random.next_u64()).to_le_bytes());
    // Version 4 and variant bits of a UUID (RFC 9562).
    id[6] = id[6] & 0x0f | 0x40;
    id[8] = id[8] & 0x3f | 0x80;
    id
}

/// Host NQN in the UUID format.
fn host_nqn_of_id(id: &[u8; 16]) -> String {
    let hex: String = id.iter().map(|byte| format!("{byte:02x}")).collect();
    let parts = [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]];
    format!("{}{}", tenmil_wire::nqn::UUID_PREFIX, parts.join("-"))
}

/// One timeout of a policy, with its description.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimeoutRow {
    /// URI key.
    pub key: &'static str,
    pub span: Span,
    pub meaning: &'static str,
}

/// Timeouts of `uri`, or the defaults without one.
pub fn timeout_rows_of_uri(uri: Option<&str>) -> Result<Vec<TimeoutRow>, Error> {
    let mut policy = match uri {
        None => TimeoutPolicy::default(),
        Some(text) => {
            let uri: Uri = text.parse()?;
            if uri.scheme() != TcpUri::SCHEME {
                let problem = "only a device behind a network has a policy, expected tcp://…";
                return Err(uri.error(problem).into());
            }
            TcpUri::from_uri(&uri)?.options.policy
        }
    };
    let rows = timeouts_with_keys(&mut policy).into_iter().zip(MEANINGS);
    Ok(rows.map(|((key, span), (_, meaning))| TimeoutRow { key, span: *span, meaning }).collect())
}

#[cfg(test)]
mod tests {
    use super::{SALT, TcpUri, derive_host_id};

    #[test]
    fn host_identifier_differs_between_machines_and_host_names() {
        let machine = 0x0123_4567_89ab_cdef_0011_2233_4455_6677;
        let id = derive_host_id(machine, SALT);
        assert_eq!((id[6] >> 4, id[8] >> 6), (4, 2), "a UUID of version 4");
        // Either half of the number, and the salt, change it.
        let others = [machine ^ 1, machine ^ 1 << 64].map(|other| derive_host_id(other, SALT));
        assert!(others.iter().all(|other| *other != id) && others[0] != others[1]);
        assert_ne!(derive_host_id(machine, SALT ^ 1), id);
        assert_eq!(derive_host_id(machine, SALT), id);
    }

    #[test]
    fn each_host_nqn_has_one_host_identifier_on_this_machine() {
        let subsystem = "nqn.2026-01.org.tenmil:disk";
        let own = TcpUri::with_default_options("127.0.0.1", subsystem).options;
        let named = |host: &str| {
            let uri = format!("tcp://127.0.0.1/{subsystem}?hostnqn={host}");
            TcpUri::from_uri(&uri.parse().unwrap()).unwrap().options
        };
        assert_eq!(named(&own.host).host_id, own.host_id, "its own NQN by name");
        let others = ["nqn.2026-01.org.tenmil:a", "nqn.2026-01.org.tenmil:b"].map(named);
        assert!(others.iter().all(|other| other.host_id != own.host_id));
        assert_ne!(others[0].host_id, others[1].host_id);
        assert_eq!(named(&others[0].host).host_id, others[0].host_id);
    }
}
