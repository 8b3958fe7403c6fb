//! `rbd:` URIs.
//!
//! ```text
//!   rbd:pool/image
//!   rbd:pool/namespace/image@snapshot
//!   rbd:pool/image?conf=/etc/ceph/ceph.conf&user=gateway&block=4k
//!   rbd:pool/image?conf-rbd-disable-zero-copy-writes=false
//! ```

use tenmil_base::Span;
use tenmil_block::BLOCK_DEFAULT;
use tenmil_block::uri::{Uri, UriError, UriOptions};

use crate::librbd::ConnectionOptions;

/// Parsed `rbd:` URI.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RbdUri {
    /// Pool, namespace and image.
    pub(crate) place: ImagePlace,
    /// Snapshot, which is read-only.
    pub(crate) snapshot: Option<String>,
    /// How the cluster is reached.
    pub(crate) access: ClusterAccess,
    /// Block size in bytes.
    pub(crate) block_size: u32,
    /// Open read-only.
    pub(crate) read_only: bool,
    /// What happens to the exclusive lock of an image that is opened to be written.
    pub(crate) lock: LockMode,
    /// The cache of librbd.
    pub(crate) cache: CacheMode,
    /// Maximum time to open the image, a wait for the lock of a client that does not answer included.
    pub(crate) open_timeout: Span,
}

/// Pool, namespace and name of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ImagePlace {
    /// Pool.
    pub(crate) pool: String,
    /// Namespace in the pool; empty for the default one.
    pub(crate) namespace: String,
    /// Name of the image.
    pub(crate) image: String,
}

/// Pool and namespace of images, and how their cluster is reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PoolPlace {
    /// Pool.
    pub(crate) pool: String,
    /// Namespace in the pool; empty for the default one.
    pub(crate) namespace: String,
    pub(crate) access: ClusterAccess,
}

/// How a cluster is reached. Devices for which this is equal share a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ClusterAccess {
    /// Names, configuration file and options of Ceph.
    pub(crate) options: ConnectionOptions,
    /// Maximum time to connect to a monitor.
    pub(crate) connect_timeout: Span,
    /// Maximum time of a request to the cluster.
    pub(crate) io_timeout: Span,
}

/// What happens to the exclusive lock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum LockMode {
    /// Acquired when the image is opened, and kept. Without the feature, the image has no lock.
    #[default]
    Exclusive,
    /// Acquired by the first write, and passed to any client that requests it.
    Automatic,
}

/// The cache of librbd. None that keeps completed writes: a failover would lose them, and another client would not read
/// them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum CacheMode {
    /// None: a completed write is stored by the cluster.
    #[default]
    Off,
    /// Reads are cached. A completed write is stored by the cluster.
    WriteThrough,
}

const YES_OR_NO: [(&str, bool); 2] = [("yes", true), ("no", false)];
const LOCKS: [(&str, LockMode); 2] =
    [("exclusive", LockMode::Exclusive), ("auto", LockMode::Automatic)];
const CACHES: [(&str, CacheMode); 2] =
    [("no", CacheMode::Off), ("writethrough", CacheMode::WriteThrough)];

const CONNECT_TIMEOUT: Span = Span::from_secs(10);
/// Ceph reports an owner of the lock that does not answer after 30 s.
const OPEN_TIMEOUT: Span = Span::from_secs(60);
const IO_TIMEOUT: Span = Span::from_secs(120);

/// Options of Ceph that keys of the URI set, since the device relies on them.
const OWN_OPTIONS: [(&str, &str); 6] = [
    ("rbd_cache", "cache"),
    ("rbd_cache_policy", "cache"),
    ("rbd_persistent_cache_mode", "cache"),
    ("client_mount_timeout", "connect-timeout"),
    ("rados_mon_op_timeout", "io-timeout"),
    ("rados_osd_op_timeout", "io-timeout"),
];

/// Options of Ceph with the time limit of requests.
const IO_TIMEOUT_OPTIONS: [&str; 2] = ["rados_mon_op_timeout", "rados_osd_op_timeout"];

/// Prefix of keys whose rest is an option of Ceph.
const CEPH_OPTION: &str = "conf-";

impl RbdUri {
    /// URI scheme.
    pub(crate) const SCHEME: &'static str = "rbd";

    /// Parses `uri`.
    ///
    /// # Errors
    ///
    /// If the pool or the image is missing, or an option is invalid.
    pub(crate) fn from_uri(uri: &Uri) -> Result<Self, UriError> {
        if !uri.children().is_empty() {
            return Err(uri.error("stands on other devices, expected rbd:POOL/IMAGE"));
        }
        let (place, snapshot) = ImagePlace::parse(uri.path()).map_err(|text| uri.error(text))?;
        let mut fields = uri.options();
        let block_size = fields.block_size()?.unwrap_or(BLOCK_DEFAULT);
        let read_only = fields.choice_value("read-only", &YES_OR_NO)?;
        let lock = fields.choice_value("lock", &LOCKS)?.unwrap_or_default();
        let cache = fields.choice_value("cache", &CACHES)?.unwrap_or_default();
        let open_timeout = timeout_value(uri, &mut fields, "open-timeout", OPEN_TIMEOUT)?;
        let access = ClusterAccess::from_options(uri, &mut fields, cache)?;
        fields.reject_unconsumed()?;
        if snapshot.is_some() && read_only == Some(false) {
            return Err(uri.error("read-only is `no`, expected `yes`: a snapshot is never written"));
        }
        Ok(Self {
            place,
            read_only: snapshot.is_some() || read_only == Some(true),
            snapshot,
            access,
            block_size,
            lock,
            cache,
            open_timeout,
        })
    }
}

impl PoolPlace {
    /// Parses `rbd:POOL` or `rbd:POOL/NAMESPACE`.
    pub(crate) fn from_uri(uri: &Uri) -> Result<Self, UriError> {
        let (pool, namespace) = uri.path().split_once('/').unwrap_or((uri.path(), ""));
        let is_malformed = namespace.contains(['/', '@']) || pool.contains('@');
        if pool.is_empty() || is_malformed || !uri.children().is_empty() {
            let problem =
                format!("`{}` names no pool, expected rbd:POOL or rbd:POOL/NAMESPACE", uri.path());
            return Err(uri.error(problem));
        }
        let mut fields = uri.options();
        let access = ClusterAccess::from_options(uri, &mut fields, CacheMode::Off)?;
        fields.reject_unconsumed()?;
        Ok(Self { pool: pool.to_owned(), namespace: namespace.to_owned(), access })
    }
}

impl ClusterAccess {
    fn from_options(
        uri: &Uri,
        fields: &mut UriOptions<'_>,
        cache: CacheMode,
    ) -> Result<Self, UriError> {
        let connect_timeout = timeout_value(uri, fields, "connect-timeout", CONNECT_TIMEOUT)?;
        let io_timeout = timeout_value(uri, fields, "io-timeout", IO_TIMEOUT)?;
        Self::with_timeouts(uri, fields, cache, (connect_timeout, io_timeout))
    }

    /// Consumes the options that reach a cluster, without those of the time limits to connect and of a request.
    pub(crate) fn with_timeouts(
        uri: &Uri,
        fields: &mut UriOptions<'_>,
        cache: CacheMode,
        (connect_timeout, io_timeout): (Span, Span),
    ) -> Result<Self, UriError> {
        let conf = fields.text_value("conf");
        let user = fields.text_value("user").unwrap_or_else(|| "admin".to_owned());
        let cluster = fields.text_value("cluster").unwrap_or_else(|| "ceph".to_owned());
        let mut settings = settings_of(cache, connect_timeout, io_timeout);
        for (key, value) in fields.text_values_with_prefix(CEPH_OPTION, "conf-NAME") {
            let option = key.replace('-', "_");
            if let Some((_, own)) = OWN_OPTIONS.iter().find(|(name, _)| *name == option) {
                return Err(
                    uri.error(format!("{CEPH_OPTION}{key} is set by `{own}`, expected that"))
                );
            }
            settings.push((option, value));
        }
        let client = format!("client.{user}");
        let options = ConnectionOptions { cluster, client, conf, settings };
        Ok(Self { options, connect_timeout, io_timeout })
    }

    /// The same with another time limit of requests.
    pub(crate) fn with_io_timeout(&self, io_timeout: Span) -> Self {
        let mut access = Self { io_timeout, ..self.clone() };
        for (key, value) in &mut access.options.settings {
            if IO_TIMEOUT_OPTIONS.contains(&key.as_str()) {
                *value = whole_seconds(io_timeout);
            }
        }
        access
    }
}

/// Consumes a time limit.
fn timeout_value(
    uri: &Uri,
    fields: &mut UriOptions<'_>,
    key: &'static str,
    default: Span,
) -> Result<Span, UriError> {
    let time = fields.time_value(key)?.unwrap_or(default);
    if !(Span::from_secs(1)..=Span::from_secs(86_400)).contains(&time) {
        return Err(uri.error(format!("{key} is {time}, expected 1s to 1440m")));
    }
    Ok(time)
}

impl ImagePlace {
    /// Parses `POOL/IMAGE`, `POOL/NAMESPACE/IMAGE`, either with `@SNAPSHOT`.
    pub(crate) fn parse(path: &str) -> Result<(Self, Option<String>), String> {
        let expected = "expected POOL/IMAGE, POOL/NAMESPACE/IMAGE or either with @SNAPSHOT";
        let (image, snapshot) = match path.split_once('@') {
            Some((image, snapshot)) => (image, Some(snapshot)),
            None => (path, None),
        };
        let parts: Vec<&str> = image.split('/').collect();
        let (pool, namespace, image) = match parts[..] {
            [pool, image] => (pool, "", image),
            [pool, namespace, image] if !namespace.is_empty() => (pool, namespace, image),
            _ => return Err(format!("`{path}` names no image, {expected}")),
        };
        let is_empty = pool.is_empty() || image.is_empty() || snapshot == Some("");
        if is_empty || snapshot.is_some_and(|snapshot| snapshot.contains('@')) {
            return Err(format!("`{path}` names no image, {expected}"));
        }
        let [pool, namespace, image] = [pool, namespace, image].map(str::to_owned);
        Ok((Self { pool, namespace, image }, snapshot.map(str::to_owned)))
    }
}

/// The options of Ceph that follow from those of the URI.
fn settings_of(cache: CacheMode, connect_timeout: Span, io_timeout: Span) -> Vec<(String, String)> {
    let is_cached = cache != CacheMode::Off;
    let mut settings = vec![
        ("client_mount_timeout", whole_seconds(connect_timeout)),
        ("rados_mon_op_timeout", whole_seconds(io_timeout)),
        ("rados_osd_op_timeout", whole_seconds(io_timeout)),
        ("rbd_cache", is_cached.to_string()),
        // A cache on a local disk keeps completed writes that the cluster does not have.
        ("rbd_persistent_cache_mode", "disabled".to_owned()),
    ];
    if is_cached {
        settings.push(("rbd_cache_policy", "writethrough".to_owned()));
    }
    settings.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
}

/// A time as Ceph has it, rounded up.
fn whole_seconds(time: Span) -> String {
    time.ns.div_ceil(1_000_000_000).to_string()
}

#[cfg(test)]
mod tests {
    use super::{CacheMode, ImagePlace, LockMode, RbdUri};

    fn parse(text: &str) -> Result<RbdUri, String> {
        RbdUri::from_uri(&text.parse().unwrap()).map_err(|error| error.to_string())
    }

    #[test]
    fn pool_namespace_image_and_snapshot_are_parsed() {
        for (text, pool, namespace, image, snapshot) in [
            ("rbd:p/i", "p", "", "i", None),
            ("rbd:p/n/i", "p", "n", "i", None),
            ("rbd:p/i@s", "p", "", "i", Some("s")),
            ("rbd:p.x/n/i-1@s/2", "p.x", "n", "i-1", Some("s/2")),
        ] {
            let found = parse(text).unwrap();
            let [pool, namespace, image] = [pool, namespace, image].map(str::to_owned);
            assert_eq!(found.place, ImagePlace { pool, namespace, image }, "{text}");
            assert_eq!(found.snapshot.as_deref(), snapshot);
            assert_eq!(found.read_only, snapshot.is_some(), "a snapshot is read-only");
        }
        for text in [
            "rbd:",
            "rbd:p",
            "rbd:p/",
            "rbd:/i",
            "rbd:p//i",
            "rbd:a/b/c/d",
            "rbd:p/i@",
            "rbd:p/i@a@b",
        ] {
            let refused = parse(text).unwrap_err();
            assert!(refused.contains("expected POOL/IMAGE"), "{refused}");
        }
    }

    #[test]
    fn completed_writes_are_not_cached_unless_requested() {
        let setting = |uri: &RbdUri, key: &str| {
            let all = uri.access.options.settings.iter();
            all.rev().find(|(name, _)| name == key).map(|(_, value)| value.clone())
        };
        let plain = parse("rbd:p/i").unwrap();
        assert_eq!((plain.cache, plain.lock), (CacheMode::Off, LockMode::Exclusive));
        assert_eq!(setting(&plain, "rbd_cache").as_deref(), Some("false"));
        assert_eq!(setting(&plain, "rados_osd_op_timeout").as_deref(), Some("120"));
        let through = parse("rbd:p/i?cache=writethrough").unwrap();
        assert_eq!(setting(&through, "rbd_cache_policy").as_deref(), Some("writethrough"));
    }

    #[test]
    fn options_of_ceph_are_passed_on() {
        let uri = parse("rbd:p/i?conf-ms-mode=crc&user=gw&io-timeout=2500ms&conf=/c").unwrap();
        let options = &uri.access.options;
        assert_eq!(options.settings.last().unwrap(), &("ms_mode".to_owned(), "crc".to_owned()));
        assert!(options.settings.contains(&("rados_osd_op_timeout".to_owned(), "3".to_owned())));
        assert_eq!((options.client.as_str(), options.conf.as_deref()), ("client.gw", Some("/c")));
    }

    #[test]
    fn invalid_options_are_rejected_with_the_accepted_ones() {
        for (text, expected) in [
            ("rbd:p/i?lock=no", "expected exclusive or auto"),
            ("rbd:p/i?cache=yes", "expected no or writethrough"),
            ("rbd:p/i?io-timeout=1ms", "expected 1s to 1440m"),
            ("rbd:p/i?conf-rbd-cache=true", "conf-rbd-cache is set by `cache`, expected that"),
            ("rbd:p/i@s?read-only=no", "a snapshot is never written"),
            ("rbd:p/i?unheard-of=1", "no parameter `unheard-of`, expected"),
            ("rbd:[ram:1m]/i", "expected rbd:POOL/IMAGE"),
        ] {
            let refused = parse(text).unwrap_err();
            assert!(refused.contains(expected), "{refused}");
        }
    }
}
