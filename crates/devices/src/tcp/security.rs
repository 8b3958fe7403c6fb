//! Security of `tcp:` devices: options of their URIs, and the keys that these name.
//!
//! ```text
//!   tcp://192.0.2.7/NQN/1?tls=required&key=NAME
//!   tcp://192.0.2.7/NQN/1?tls=concatenate&dhchap=NAME&dhchap-controller=NAME
//!                                                │ names of keys, never keys
//!   key source of the program ── text of a key ──┴─▶ Authentication, TlsKeys, per device
//! ```
//!
//! Names are looked up when a device is opened, again by [`reload_keys`], and again when the peer refuses the
//! keys, before the next attempt: on a thread of its own, since keyrings may be slow.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Mutex, PoisonError, RwLock, Weak};

use tenmil_base::Error;
use tenmil_block::uri::{Uri, UriError, UriOptions};
use tenmil_linux::thread_pool::{BlockingTask, ThreadPool};
use tenmil_nvme_auth::{
    ChapSecret, ConfiguredPsk, Derivation, IdentityVersion, KERNEL_KEYRING, KeyError, KeySource,
    KeyText, TlsPsk, sort_tls_psks, tls_psk_candidates,
};
use tenmil_nvme_fabrics::{Authentication, ChapSecrets, KeyLookup, Options, SecureChannelMode};

use super::key_arithmetic::{DhThreads, KernelRandom};

/// Security options of a `tcp://` URI. They name keys, and hold none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TcpSecurity {
    /// Whether connections have to be TLS connections, and where their key comes from.
    pub tls: SecureChannelMode,
    /// Names of pre-shared keys of TLS, the preferred ones first; [`KERNEL_KEYRING`] stands for those of the
    /// kernel's keyring.
    pub keys: Vec<String>,
    /// Derivation of TLS keys from these.
    pub derivation: Option<Derivation>,
    /// Version of the identities that are offered; any if it is absent.
    pub identity: Option<IdentityVersion>,
    /// Name of the DH-HMAC-CHAP secret of this host.
    pub dhchap: Option<String>,
    /// Names of the DH-HMAC-CHAP secrets of the subsystem, of which its controllers have to have one.
    pub dhchap_controller: Vec<String>,
}

/// The keys that a `tcp:` device uses. Clones share them.
#[derive(Clone)]
pub(super) struct DeviceKeys {
    shared: Arc<SharedDeviceKeys>,
}

struct SharedDeviceKeys {
    /// URI of the device, for messages.
    device: String,
    security: TcpSecurity,
    host: String,
    subsystem: String,
    authentication: Option<Authentication>,
    psks: Mutex<Vec<TlsPsk>>,
    is_lookup_in_progress: AtomicBool,
}

/// Looks up the keys of a device that a peer has refused.
struct RefusedKeyLookup {
    /// The keys have the authentication, which has this.
    device: Weak<SharedDeviceKeys>,
}

/// A lookup in progress; dropped at its end, also if it could not begin.
struct LookupInProgress(Arc<SharedDeviceKeys>);

/// Thread for lookups of keys that were refused, and lookups that may wait for it. A keyring may be on a
/// file system that hangs, so it is none that does anything else.
static LOOKUPS: LazyLock<ThreadPool> = LazyLock::new(|| ThreadPool::new(1, 1024));

/// Where keys are looked up.
static KEY_SOURCE: RwLock<Option<Arc<dyn KeySource>>> = RwLock::new(None);

/// Keys of all open devices, for [`reload_keys`].
static DEVICES: Mutex<Vec<Weak<SharedDeviceKeys>>> = Mutex::new(Vec::new());

const TLS: [(&str, SecureChannelMode); 3] = [
    ("off", SecureChannelMode::Off),
    ("required", SecureChannelMode::Required),
    ("concatenate", SecureChannelMode::Concatenate),
];
const DERIVATIONS: [(&str, Derivation); 2] =
    [("spec", Derivation::Specification), ("libnvme-1.13", Derivation::LibnvmeBefore115)];
const IDENTITIES: [(&str, IdentityVersion); 2] =
    [("0", IdentityVersion::Zero), ("1", IdentityVersion::One)];

/// Sets where the names of keys in `tcp://` URIs are looked up from now on. A program calls it at its
/// start.
pub fn set_key_source(source: Arc<dyn KeySource>) {
    *KEY_SOURCE.write().unwrap_or_else(PoisonError::into_inner) = Some(source);
}

/// Looks the keys of all open devices up again: new connections use them, and each connected controller
/// with a DH-HMAC-CHAP secret is authenticated again if one has changed. Returns the devices whose keys stay
/// as they are because a key cannot be read.
pub fn reload_keys() -> Vec<(String, Error)> {
    let devices: Vec<_> = {
        let mut devices = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
        devices.retain(|device| device.strong_count() > 0);
        devices.iter().filter_map(Weak::upgrade).collect()
    };
    let reload = |device: Arc<SharedDeviceKeys>| {
        let error = device.reload().err()?;
        Some((device.device.clone(), error))
    };
    devices.into_iter().filter_map(reload).collect()
}

impl TcpSecurity {
    /// Consumes the security options of a URI.
    pub(super) fn from_options(uri: &Uri, fields: &mut UriOptions<'_>) -> Result<Self, UriError> {
        let names = |text: Option<String>| -> Vec<String> {
            text.map_or_else(Vec::new, |text| text.split(',').map(str::to_owned).collect())
        };
        let tls = fields.choice_value("tls", &TLS)?;
        let keys = names(fields.text_value("key"));
        let security = Self {
            // A key that is given is used.
            tls: tls.unwrap_or(match keys.is_empty() {
                true => SecureChannelMode::Off,
                false => SecureChannelMode::Required,
            }),
            keys,
            derivation: fields.choice_value("derivation", &DERIVATIONS)?,
            identity: fields.choice_value("tls-identity", &IDENTITIES)?,
            dhchap: fields.text_value("dhchap"),
            dhchap_controller: names(fields.text_value("dhchap-controller")),
        };
        security.check().map_err(|problem| uri.error(problem))?;
        Ok(security)
    }

    /// Checks that each option has those that it needs.
    fn check(&self) -> Result<(), &'static str> {
        let Self { tls, keys, derivation, identity, dhchap, dhchap_controller } = self;
        let has_keys = !keys.is_empty();
        let mut names = keys.iter().chain(dhchap).chain(dhchap_controller);
        if names.any(String::is_empty) {
            return Err("a key has no name, expected key=NAME");
        }
        match tls {
            SecureChannelMode::Required if !has_keys => {
                return Err("tls=required has no key, expected key=NAME");
            }
            SecureChannelMode::Concatenate if has_keys => {
                return Err("tls=concatenate generates its key, expected no key=NAME");
            }
            SecureChannelMode::Concatenate if dhchap.is_none() => {
                return Err("tls=concatenate has no secret of this host, expected dhchap=NAME");
            }
            SecureChannelMode::Off if has_keys => {
                return Err("key is given with tls=off, expected tls=required");
            }
            _ => {}
        }
        if (derivation.is_some() || identity.is_some()) && !has_keys {
            return Err("derivation and tls-identity are for a key, expected key=NAME");
        }
        if derivation.is_some() && keys.iter().all(|key| key == KERNEL_KEYRING) {
            return Err("keys of .nvme are derived already, expected no derivation");
        }
        if dhchap.iter().chain(dhchap_controller).any(|name| name == KERNEL_KEYRING) {
            return Err(".nvme has keys of TLS only, expected the name of a DH-HMAC-CHAP secret");
        }
        if dhchap.is_none() && !dhchap_controller.is_empty() {
            return Err("dhchap-controller has no secret of this host, expected dhchap=NAME");
        }
        Ok(())
    }

    /// The options as they stand in a URI.
    pub fn uri_options(&self) -> Vec<(&'static str, String)> {
        fn word<T: PartialEq>(choices: &[(&'static str, T)], value: &T) -> String {
            let found = choices.iter().find(|(_, choice)| choice == value);
            found.map_or("", |(word, _)| word).to_owned()
        }
        let mut options = Vec::new();
        if self.tls != SecureChannelMode::Off {
            options.push(("tls", word(&TLS, &self.tls)));
        }
        if !self.keys.is_empty() {
            options.push(("key", self.keys.join(",")));
        }
        options.extend(self.derivation.map(|it| ("derivation", word(&DERIVATIONS, &it))));
        options.extend(self.identity.map(|it| ("tls-identity", word(&IDENTITIES, &it))));
        options.extend(self.dhchap.clone().map(|name| ("dhchap", name)));
        if !self.dhchap_controller.is_empty() {
            options.push(("dhchap-controller", self.dhchap_controller.join(",")));
        }
        options
    }
}

impl DeviceKeys {
    /// Looks up the keys that `security` names, for a device with these options.
    ///
    /// # Errors
    ///
    /// If a key does not exist or is not of the kind that is needed, or this program has no TLS.
    pub(super) fn look_up(
        device: String,
        security: &TcpSecurity,
        options: &Options,
    ) -> Result<Self, Error> {
        if security.tls != SecureChannelMode::Off && !cfg!(feature = "tls") {
            let text = format!("open {device}: this program has no TLS");
            return Err(Error::environment(text).with_hint("build it with the feature `tls`"));
        }
        let (host, subsystem) = (options.host.clone(), options.subsystem.clone());
        let secrets = security.chap_secrets()?;
        let psks = security.tls_psks(&host, &subsystem)?;
        let authentication = |device: &Weak<SharedDeviceKeys>| {
            let (executor, random) = (Arc::new(DhThreads), Arc::new(KernelRandom));
            let lookup = RefusedKeyLookup { device: device.clone() };
            secrets.map(|secrets| {
                let mut authentication = Authentication::new(secrets, executor, random);
                authentication.lookup = Some(Arc::new(lookup));
                authentication
            })
        };
        let shared = Arc::new_cyclic(|this| SharedDeviceKeys {
            device,
            security: security.clone(),
            host,
            subsystem,
            authentication: authentication(this),
            psks: Mutex::new(psks),
            is_lookup_in_progress: AtomicBool::new(false),
        });
        let mut devices = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
        devices.retain(|device| device.strong_count() > 0);
        if shared.security != TcpSecurity::default() {
            devices.push(Arc::downgrade(&shared));
        }
        Ok(Self { shared })
    }

    /// Connection options with the security of the device.
    pub(super) fn secure(&self, options: &Options) -> Options {
        let authentication = self.shared.authentication.clone();
        Options { authentication, secure_channel: self.shared.security.tls, ..options.clone() }
    }

    /// Security options of the device.
    #[cfg(feature = "tls")]
    pub(super) fn security(&self) -> &TcpSecurity {
        &self.shared.security
    }

    /// Has the keys looked up again, because the peer has refused them. Returns at once.
    #[cfg(feature = "tls")]
    pub(super) fn start_lookup(&self) {
        self.shared.start_lookup();
    }

    #[cfg(all(test, feature = "tls"))]
    pub(super) fn is_lookup_in_progress(&self) -> bool {
        self.shared.is_lookup_in_progress.load(Ordering::Acquire)
    }

    /// Keys that a TLS handshake offers, the preferred ones first.
    #[cfg(feature = "tls")]
    pub(super) fn tls_psks(&self) -> Vec<TlsPsk> {
        self.shared.psks.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl KeyLookup for RefusedKeyLookup {
    fn start(&self) {
        if let Some(device) = self.device.upgrade() {
            device.start_lookup();
        }
    }

    fn is_in_progress(&self) -> bool {
        let device = self.device.upgrade();
        device.is_some_and(|device| device.is_lookup_in_progress.load(Ordering::Acquire))
    }
}

impl Drop for LookupInProgress {
    fn drop(&mut self) {
        // After the keys are replaced, for a thread that reads this with Acquire.
        self.0.is_lookup_in_progress.store(false, Ordering::Release);
    }
}

impl SharedDeviceKeys {
    /// Looks the keys up again on another thread, unless that is in progress.
    fn start_lookup(self: &Arc<Self>) {
        if self.is_lookup_in_progress.swap(true, Ordering::Relaxed) {
            return;
        }
        let lookup = LookupInProgress(Arc::clone(self));
        // A lookup that is one too many is dropped, and the next attempt is made with the former keys.
        let _ = LOOKUPS.submit(BlockingTask::new("keys", move || lookup.run()));
    }

    /// Looks the keys up again. Returns whether any has changed.
    fn reload(&self) -> Result<bool, Error> {
        let Self { security, host, subsystem, authentication, psks, .. } = self;
        // All keys are read before one is replaced.
        let (secrets, found) = (security.chap_secrets()?, security.tls_psks(host, subsystem)?);
        let mut psks = psks.lock().unwrap_or_else(PoisonError::into_inner);
        let mut has_changed = *psks != found;
        *psks = found;
        drop(psks);
        if let (Some(authentication), Some(secrets)) = (authentication, secrets)
            && authentication.secrets() != secrets
        {
            authentication.replace_secrets(secrets);
            has_changed = true;
        }
        Ok(has_changed)
    }
}

impl LookupInProgress {
    fn run(&self) {
        let Self(keys) = self;
        let device = &keys.device;
        match keys.reload() {
            Ok(true) => tracing::info!(
                cause = %device,
                "{device}: its keys were refused; its keyring has others by now, which it uses"
            ),
            Ok(false) => tracing::info!(
                cause = %device,
                "{device}: its keys were refused, and its keyring has no others"
            ),
            Err(why) => tracing::warn!(
                cause = %device,
                "{device}: its keys were refused, and it keeps them: {why}"
            ),
        }
    }
}

impl TcpSecurity {
    fn chap_secrets(&self) -> Result<Option<ChapSecrets>, Error> {
        let Some(dhchap) = &self.dhchap else { return Ok(None) };
        let secret = |name: &String| find_key(name, "DH-HMAC-CHAP secret", KeyText::chap_secret);
        let controller: Result<Vec<ChapSecret>, Error> =
            self.dhchap_controller.iter().map(secret).collect();
        Ok(Some(ChapSecrets { host: secret(dhchap)?, controller: controller? }))
    }

    /// TLS keys for a host and a subsystem, in the order in which Linux prefers them.
    fn tls_psks(&self, host: &str, subsystem: &str) -> Result<Vec<TlsPsk>, Error> {
        let configured: Result<Vec<ConfiguredPsk>, Error> = self
            .keys
            .iter()
            .filter(|name| *name != KERNEL_KEYRING)
            .map(|name| find_key(name, "pre-shared key of TLS", KeyText::psk))
            .collect();
        let derivation = self.derivation.unwrap_or(Derivation::Specification);
        let mut candidates = tls_psk_candidates(&configured?, host, subsystem);
        candidates.retain(|psk| psk.derivation == derivation);
        if self.keys.iter().any(|name| name == KERNEL_KEYRING) {
            let mut found =
                key_source("pre-shared key of TLS")?.find_kernel_psks(host, subsystem)?;
            // The same key may be in both keyrings.
            found.retain(|psk| !candidates.contains(psk));
            candidates.extend(found);
            sort_tls_psks(&mut candidates);
        }
        candidates.retain(|psk| self.identity.is_none_or(|identity| psk.version == identity));
        if candidates.is_empty() && !self.keys.is_empty() {
            return Err(self.no_candidate(host, subsystem));
        }
        Ok(candidates)
    }

    /// Error for keys of which none has an identity of the version that is to be offered.
    fn no_candidate(&self, host: &str, subsystem: &str) -> Error {
        if self.keys.iter().any(|name| name == KERNEL_KEYRING) {
            let version = self.identity.map_or(1, IdentityVersion::digit);
            let text = format!(
                "find TLS keys for {host} and {subsystem}: keyring {KERNEL_KEYRING} of the kernel has none \
                 with an identity of version {version}"
            );
            return Error::usage(text).with_hint("use another tls-identity, or none");
        }
        let text = format!(
            "derive TLS keys for {host} and {subsystem}: the names are too long for version 0 identities"
        );
        Error::usage(text).with_hint("use tls-identity=1, or shorter NQNs")
    }
}

/// Where keys are looked up.
fn key_source(kind: &str) -> Result<Arc<dyn KeySource>, Error> {
    let source = KEY_SOURCE.read().unwrap_or_else(PoisonError::into_inner).clone();
    source.ok_or_else(|| {
        Error::environment(format!("find a {kind}: this program has no keyring, expected one"))
    })
}

/// Looks a key up and parses it.
fn find_key<T>(
    name: &str,
    kind: &str,
    parse: impl FnOnce(&KeyText) -> Result<T, KeyError>,
) -> Result<T, Error> {
    let text = key_source(kind)?.find_key(name)?;
    parse(&text).map_err(|error| {
        let hint = format!("`tenmil key generate` makes a {kind}");
        Error::usage(format!("key `{name}`: {error}")).with_hint(hint)
    })
}

#[cfg(test)]
pub(super) mod tests;
