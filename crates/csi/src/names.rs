//! Names of volumes and snapshots in a pool, and their identifiers.
//!
//! | object | name in the pool | identifier |
//! |---|---|---|
//! | volume | `csi.NAME` | `POOL/csi.NAME` |
//! | snapshot | `csi.NAME@VOLUME@SECONDS` | `POOL/csi.NAME@VOLUME@SECONDS` |
//! | snapshot of a group | `csi-group.NAME@VOLUME@SECONDS` | `POOL/csi-group.NAME@VOLUME@SECONDS` |
//! | group snapshot | | `POOL/csi-group.NAME@SECONDS` |
//!
//! NAME is the name that the orchestrator gave, or a hash of one that is long or has other characters. VOLUME is
//! NAME of the source volume, SECONDS the time of creation since 1970, and POOL the UUID of the pool. So the
//! source of a snapshot and its time are known when the source is deleted, and the driver keeps no state.

use std::fmt;

use sha2::{Digest, Sha256};

/// Longest NAME that is not replaced by its hash: of a snapshot's name in a pool, which may have 128 bytes, it
/// occurs twice.
const NAME_LEN_MAX: usize = 48;
/// First characters of a hash.
const HASH_PREFIX: &str = "h.";
/// Hexadecimal digits of a hash.
const HASH_DIGITS: usize = 40;
const VOLUME_PREFIX: &str = "csi.";
const GROUP_PREFIX: &str = "csi-group.";
const NQN_PREFIX: &str = "nqn.2026-01.org.tenmil:csi:";
/// Length of the UUID of a pool, in hexadecimal digits.
const POOL_LEN: usize = 32;
/// Longest name of a volume in a pool.
const POOL_NAME_LEN_MAX: usize = 128;
const SECONDS_DIGITS_MAX: usize = 11;

const _: () = assert!(HASH_PREFIX.len() + HASH_DIGITS <= NAME_LEN_MAX);
const _: () =
    assert!(GROUP_PREFIX.len() + 2 * NAME_LEN_MAX + 2 + SECONDS_DIGITS_MAX <= POOL_NAME_LEN_MAX);
const _: () = assert!(NQN_PREFIX.len() + POOL_LEN + 1 + NAME_LEN_MAX <= 223);

/// Identifier of a volume.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct VolumeId {
    /// UUID of the pool.
    pub(crate) pool: String,
    name: String,
}

/// Identifier of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct SnapshotId {
    /// UUID of the pool.
    pub(crate) pool: String,
    is_of_group: bool,
    name: String,
    volume: String,
    /// Time of creation since 1970.
    pub(crate) seconds: u64,
}

/// Identifier of a group snapshot.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct GroupId {
    /// UUID of the pool.
    pub(crate) pool: String,
    name: String,
    /// Time of creation since 1970.
    pub(crate) seconds: u64,
}

impl VolumeId {
    /// Identifier of the volume that the orchestrator calls `name`.
    pub(crate) fn new(pool: &str, name: &str) -> Self {
        Self { pool: pool.to_owned(), name: short_name(name) }
    }

    /// `None` if the text is not an identifier of the driver.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let (pool, name) = split_pool(text)?;
        Self::of_pool_name(pool, name)
    }

    /// Identifier of the volume with a name in a pool; `None` if the driver did not create it.
    pub(crate) fn of_pool_name(pool: &str, name: &str) -> Option<Self> {
        let name = name.strip_prefix(VOLUME_PREFIX).filter(|name| is_short_name(name))?;
        Some(Self { pool: pool.to_owned(), name: name.to_owned() })
    }

    /// Name in the pool.
    pub(crate) fn pool_name(&self) -> String {
        format!("{VOLUME_PREFIX}{}", self.name)
    }

    /// NQN of the subsystem that has the volume as its only namespace.
    pub(crate) fn nqn(&self) -> String {
        format!("{NQN_PREFIX}{}:{}", self.pool, self.name)
    }
}

impl SnapshotId {
    /// Identifier of a new snapshot that the orchestrator calls `name`.
    pub(crate) fn new(volume: &VolumeId, name: &str, seconds: u64) -> Self {
        let (pool, volume) = (volume.pool.clone(), volume.name.clone());
        Self { pool, is_of_group: false, name: short_name(name), volume, seconds }
    }

    /// Identifier of the snapshot of a volume in a new group snapshot.
    pub(crate) fn of_group(group: &GroupId, volume: &VolumeId) -> Self {
        let GroupId { pool, name, seconds } = group.clone();
        Self { pool, is_of_group: true, name, volume: volume.name.clone(), seconds }
    }

    /// `None` if the text is not an identifier of the driver.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let (pool, name) = split_pool(text)?;
        Self::of_pool_name(pool, name)
    }

    /// Identifier of the snapshot with a name in a pool; `None` if the driver did not create it.
    pub(crate) fn of_pool_name(pool: &str, text: &str) -> Option<Self> {
        let (is_of_group, rest) = match text.strip_prefix(GROUP_PREFIX) {
            Some(rest) => (true, rest),
            None => (false, text.strip_prefix(VOLUME_PREFIX)?),
        };
        let mut parts = rest.split('@');
        let mut name = || parts.next().filter(|name| is_short_name(name)).map(str::to_owned);
        let (name, volume) = (name()?, name()?);
        let seconds = parse_seconds(parts.next()?)?;
        let is_whole = parts.next().is_none();
        let pool = pool.to_owned();
        is_whole.then_some(Self { pool, is_of_group, name, volume, seconds })
    }

    /// Name in the pool.
    pub(crate) fn pool_name(&self) -> String {
        let prefix = if self.is_of_group { GROUP_PREFIX } else { VOLUME_PREFIX };
        format!("{prefix}{}@{}@{}", self.name, self.volume, self.seconds)
    }

    /// The volume that it is a snapshot of.
    pub(crate) fn source(&self) -> VolumeId {
        VolumeId { pool: self.pool.clone(), name: self.volume.clone() }
    }

    /// The group snapshot that it belongs to.
    pub(crate) fn group(&self) -> Option<GroupId> {
        let Self { pool, name, seconds, .. } = self.clone();
        self.is_of_group.then_some(GroupId { pool, name, seconds })
    }

    /// Whether the orchestrator calls it `name`, and it belongs to no group.
    pub(crate) fn is_called(&self, name: &str) -> bool {
        !self.is_of_group && self.name == short_name(name)
    }
}

impl GroupId {
    /// Identifier of a new group snapshot that the orchestrator calls `name`.
    pub(crate) fn new(pool: &str, name: &str, seconds: u64) -> Self {
        Self { pool: pool.to_owned(), name: short_name(name), seconds }
    }

    /// `None` if the text is not an identifier of the driver.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let (pool, rest) = split_pool(text)?;
        let (name, seconds) = rest.strip_prefix(GROUP_PREFIX)?.split_once('@')?;
        let (pool, seconds) = (pool.to_owned(), parse_seconds(seconds)?);
        is_short_name(name).then(|| Self { pool, name: name.to_owned(), seconds })
    }

    /// Whether the orchestrator calls it `name`.
    pub(crate) fn is_called(&self, name: &str) -> bool {
        self.name == short_name(name)
    }
}

impl fmt::Display for VolumeId {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}/{}", self.pool, self.pool_name())
    }
}

impl fmt::Display for SnapshotId {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}/{}", self.pool, self.pool_name())
    }
}

impl fmt::Display for GroupId {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}/{GROUP_PREFIX}{}@{}", self.pool, self.name, self.seconds)
    }
}

/// Whether a node identifier is an NQN of a host (Base 2.1 §4.7).
pub(crate) fn is_host_nqn(text: &str) -> bool {
    let has_domain = |rest: &str| rest.len() > 8 && rest.is_char_boundary(7);
    text.len() <= 223
        && text.strip_prefix("nqn.").is_some_and(has_domain)
        && !text.contains(|c: char| c.is_control() || c.is_whitespace() || c == ',')
}

/// Host identifier that belongs to the NQN of a host: always the same, because Linux refuses an NQN with another
/// one. It has the form of a UUID of version 8 (RFC 9562 §5.8).
pub(crate) fn host_identifier(nqn: &str) -> String {
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&Sha256::digest(nqn.as_bytes())[..16]);
    bytes[6] = bytes[6] & 0x0f | 0x80;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    let digits = hexadecimal(&bytes);
    let part = |from: usize, to: usize| &digits[from..to];
    format!("{}-{}-{}-{}-{}", part(0, 8), part(8, 12), part(12, 16), part(16, 20), part(20, 32))
}

/// The first digits of a hash of a text.
pub(crate) fn hash_text(text: &str, digits: usize) -> String {
    let mut hash = hexadecimal(&Sha256::digest(text.as_bytes()));
    hash.truncate(digits);
    hash
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The name itself, or its hash.
fn short_name(name: &str) -> String {
    if is_short_name(name) && !name.starts_with(HASH_PREFIX) {
        return name.to_owned();
    }
    format!("{HASH_PREFIX}{}", hash_text(name, HASH_DIGITS))
}

fn is_short_name(name: &str) -> bool {
    let is_fit = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    (1..=NAME_LEN_MAX).contains(&name.len()) && name.bytes().all(is_fit)
}

fn split_pool(text: &str) -> Option<(&str, &str)> {
    let (pool, rest) = text.split_once('/')?;
    let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    (pool.len() == POOL_LEN && pool.bytes().all(is_digit)).then_some((pool, rest))
}

fn parse_seconds(text: &str) -> Option<u64> {
    let is_fit = (1..=SECONDS_DIGITS_MAX).contains(&text.len());
    let seconds = text.parse().ok().filter(|_| is_fit)?;
    // One spelling only.
    (text == u64::to_string(&seconds)).then_some(seconds)
}

#[cfg(test)]
mod tests {
    use super::{GroupId, SnapshotId, VolumeId, host_identifier, is_host_nqn};

    const POOL: &str = "0123456789abcdef0123456789abcdef";

    #[test]
    fn identifiers_are_read_back() {
        let long = "n".repeat(128);
        for name in ["pvc-1", "ä@/", "h.0", "", &long] {
            let volume = VolumeId::new(POOL, name);
            assert_eq!(VolumeId::parse(&volume.to_string()), Some(volume.clone()));
            assert!(volume.nqn().len() <= 223 && is_host_nqn(&volume.nqn()));
            let snapshot = SnapshotId::new(&volume, name, 1_700_000_000);
            assert_eq!(SnapshotId::parse(&snapshot.to_string()), Some(snapshot.clone()));
            assert_eq!((snapshot.source(), snapshot.group()), (volume.clone(), None));
            assert!(snapshot.is_called(name) && !snapshot.is_called("other"));
            let group = GroupId::new(POOL, name, 1_700_000_000);
            assert_eq!(GroupId::parse(&group.to_string()), Some(group.clone()));
            let member = SnapshotId::of_group(&group, &volume);
            assert!(member.pool_name().len() <= 128);
            assert_eq!(SnapshotId::parse(&member.to_string()), Some(member.clone()));
            assert_eq!((member.source(), member.group()), (volume, Some(group)));
            assert!(!member.is_called(name));
        }
    }

    #[test]
    fn hash_of_a_name_is_not_the_name_of_another_object() {
        let long = "n".repeat(128);
        let volume = VolumeId::new(POOL, &long);
        let hash = volume.pool_name().strip_prefix("csi.").unwrap().to_owned();
        assert_ne!(VolumeId::new(POOL, &hash), volume);
    }

    #[test]
    fn other_texts_are_no_identifiers() {
        for text in ["", "x", "db", "POOL/csi.a", &format!("{POOL}/db"), &format!("{POOL}/csi.")] {
            assert_eq!(VolumeId::parse(text), None, "{text}");
            assert_eq!(SnapshotId::parse(text), None, "{text}");
            assert_eq!(GroupId::parse(text), None, "{text}");
        }
        for text in ["csi.a@b", "csi.a@b@01", "csi.a@b@1@2", "csi.a@@1", "csi.a@b@x"] {
            assert_eq!(SnapshotId::parse(&format!("{POOL}/{text}")), None, "{text}");
            assert_eq!(VolumeId::parse(&format!("{POOL}/{text}")), None, "{text}");
        }
    }

    #[test]
    fn node_identifier_is_a_host_nqn_with_one_host_identifier() {
        let nqn = "nqn.2014-08.org.example:node";
        assert!(is_host_nqn(nqn));
        for text in ["", "fake-node-id-1", "nqn.", "nqn.2014-08.a,b", &format!("{nqn}{POOL:>200}")]
        {
            assert!(!is_host_nqn(text), "{text}");
        }
        let identifier = host_identifier(nqn);
        assert_eq!((identifier.len(), &identifier[14..15]), (36, "8"));
        assert_ne!(identifier, host_identifier("nqn.2014-08.org.example:other"));
    }
}
