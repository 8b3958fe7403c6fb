//! Tests of security options and of the keys that they name.

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock, Mutex};

use tenmil_base::Error;
use tenmil_block::uri::Uri;
use tenmil_nvme_auth::{
    ChapSecret, ConfiguredPsk, Derivation, Hash, IdentityVersion, KeyHash, KeySource, KeyText,
    SecretBytes, TlsPsk, tls_psk_candidates,
};
use tenmil_nvme_fabrics::{Options, SecureChannelMode};

use super::{DeviceKeys, TcpSecurity, reload_keys, set_key_source};
use crate::tcp::tcp_uri::TcpUri;

pub(in crate::tcp) const NQN: &str = "nqn.2024-01.example:disk";
pub(in crate::tcp) const HOST: &str = "nqn.2024-01.example:host";

/// Keys of all tests of this process. Each test has its own names.
#[derive(Default)]
struct KeysInMemory(Mutex<BTreeMap<String, String>>, Mutex<Vec<(String, TlsPsk)>>);

impl KeySource for KeysInMemory {
    fn find_key(&self, name: &str) -> Result<KeyText, Error> {
        let found = self.0.lock().unwrap().get(name).cloned();
        let text = format!("find key `{name}`: no such key");
        found.map(KeyText::new).ok_or_else(|| Error::usage(text))
    }

    /// Those of the kernel, by the subsystem NQN.
    fn find_kernel_psks(&self, host_nqn: &str, subsystem_nqn: &str) -> Result<Vec<TlsPsk>, Error> {
        let psks = self.1.lock().unwrap();
        let found = psks.iter().filter(|(of, _)| of == subsystem_nqn);
        let found: Vec<_> = found.map(|(_, psk)| psk.clone()).collect();
        assert!(found.iter().all(|psk| psk.identity.contains(host_nqn)));
        match found.is_empty() {
            true => Err(Error::environment(format!("no TLS PSK of {subsystem_nqn}"))),
            false => Ok(found),
        }
    }
}

static KEYS: LazyLock<Arc<KeysInMemory>> = LazyLock::new(|| {
    let keys = Arc::<KeysInMemory>::default();
    set_key_source(Arc::clone(&keys) as Arc<dyn KeySource>);
    keys
});

fn chap_secret(number: u8) -> ChapSecret {
    ChapSecret::generate(KeyHash::None, SecretBytes::new(vec![number; 32])).unwrap()
}

fn store_chap(name: &str, number: u8) {
    let text = chap_secret(number).to_text().to_string();
    KEYS.0.lock().unwrap().insert(name.to_owned(), text);
}

pub(in crate::tcp) fn store_psk(name: &str, len: usize) {
    let random = SecretBytes::new(vec![7; len]);
    let psk = ConfiguredPsk::generate(KeyHash::None, random).unwrap();
    KEYS.0.lock().unwrap().insert(name.to_owned(), psk.to_text().to_string());
}

pub(in crate::tcp) fn remove_key(name: &str) {
    KEYS.0.lock().unwrap().remove(name);
}

pub(in crate::tcp) fn security_of(query: &str) -> Result<TcpSecurity, String> {
    let uri: Uri = format!("tcp://192.0.2.7/{NQN}?{query}").parse().unwrap();
    TcpUri::from_uri(&uri).map(|name| name.security).map_err(|error| error.to_string())
}

fn keys_of(security: &TcpSecurity) -> Result<DeviceKeys, Error> {
    let options = Options::new(NQN, HOST, [1; 16]);
    DeviceKeys::look_up(format!("tcp://192.0.2.7/{NQN}"), security, &options)
}

#[test]
fn uri_options_are_parsed_and_written_back() {
    for query in [
        "tls=required&key=a",
        "tls=required&key=a,b&derivation=libnvme-1.13&tls-identity=0",
        "tls=required&key=a&dhchap=c&dhchap-controller=d,e",
        "tls=concatenate&dhchap=c&dhchap-controller=d",
        "tls=required&key=.nvme,a",
        "dhchap=c",
    ] {
        let options = security_of(query).unwrap().uri_options();
        let text: Vec<String> =
            options.iter().map(|(key, value)| format!("{key}={value}")).collect();
        assert_eq!(text.join("&"), query);
    }
    let full = security_of("key=a&derivation=spec&tls-identity=1").unwrap();
    assert_eq!(full.tls, SecureChannelMode::Required, "a key that is given is used");
    assert_eq!(full.derivation, Some(Derivation::Specification));
    assert_eq!(full.identity, Some(IdentityVersion::One));
    assert_eq!(security_of("tls=off").unwrap(), TcpSecurity::default());
}

#[test]
fn option_that_lacks_another_is_refused() {
    for (query, expected) in [
        ("tls=required", "tls=required has no key, expected key=NAME"),
        ("tls=off&key=a", "key is given with tls=off, expected tls=required"),
        ("tls=concatenate", "tls=concatenate has no secret of this host, expected dhchap=NAME"),
        ("tls=concatenate&key=a&dhchap=b", "expected no key=NAME"),
        ("dhchap-controller=a", "expected dhchap=NAME"),
        ("derivation=spec", "derivation and tls-identity are for a key"),
        ("key=a,,b", "a key has no name"),
        ("key=.nvme&derivation=spec", "keys of .nvme are derived already"),
        ("dhchap=.nvme", ".nvme has keys of TLS only"),
        ("dhchap=a&dhchap-controller=.nvme", ".nvme has keys of TLS only"),
        ("tls=maybe", "tls is `maybe`, expected off, required or concatenate"),
    ] {
        let refused = security_of(query).unwrap_err();
        assert!(refused.contains(expected), "{query}: {refused}");
    }
}

#[test]
fn secrets_are_looked_up_by_name() {
    store_chap("look-up-host", 1);
    store_chap("look-up-controller", 2);
    store_psk("look-up-psk", 32);
    let security = security_of("dhchap=look-up-host&dhchap-controller=look-up-controller").unwrap();
    let keys = keys_of(&security).unwrap();
    let options = keys.secure(&Options::new(NQN, HOST, [1; 16]));
    let secrets = options.authentication.unwrap().secrets();
    assert_eq!(secrets.host, chap_secret(1));
    assert_eq!(secrets.controller, [chap_secret(2)]);
    for (query, expected) in [
        ("dhchap=look-up-none", "find key `look-up-none`: no such key"),
        ("dhchap=look-up-psk", "key `look-up-psk`: parse key: found a NVMeTLSkey-1 key"),
    ] {
        let refused = keys_of(&security_of(query).unwrap()).err().unwrap();
        assert!(refused.text.contains(expected), "{refused}");
    }
}

#[test]
fn tls_keys_are_in_the_order_of_linux() {
    store_psk("order-256", 32);
    store_psk("order-384", 48);
    let psks = |query: &str| {
        let psks = security_of(query).unwrap().tls_psks(HOST, NQN).unwrap();
        let part = |psk: &TlsPsk| (psk.version.digit(), psk.hash, psk.derivation);
        psks.iter().map(part).collect::<Vec<_>>()
    };
    let spec = Derivation::Specification;
    let (small, large) = (Hash::Sha256, Hash::Sha384);
    let expected = [(1, large, spec), (1, small, spec), (0, large, spec), (0, small, spec)];
    assert_eq!(psks("key=order-256,order-384"), expected);
    assert_eq!(psks("key=order-256&tls-identity=0"), [(0, small, spec)]);
    let old = Derivation::LibnvmeBefore115;
    let found = psks("key=order-256&derivation=libnvme-1.13");
    assert_eq!(found, [(1, small, old), (0, small, old)]);
}

#[test]
fn keys_of_the_kernel_are_offered_with_those_of_the_keyring() {
    const SUBSYSTEM: &str = "nqn.2024-01.example:kernel";
    store_psk("with-kernel", 32);
    let psk = |number: u8, len| {
        let random = SecretBytes::new(vec![number; len]);
        ConfiguredPsk::generate(KeyHash::None, random).unwrap()
    };
    let spec = |configured: &[ConfiguredPsk]| {
        let mut psks = tls_psk_candidates(configured, HOST, SUBSYSTEM);
        psks.retain(|psk| psk.derivation == Derivation::Specification);
        psks
    };
    let tls_psks = |query: &str| security_of(query).unwrap().tls_psks(HOST, SUBSYSTEM);
    let refused = tls_psks("key=.nvme").err().unwrap();
    assert!(refused.text.contains(SUBSYSTEM), "{refused}");
    assert!(tls_psks("key=with-kernel,.nvme").is_err(), "each that is named has to be there");
    // One that is in both, and another one.
    let in_kernel = spec(&[psk(8, 48), psk(7, 32)]);
    let stored = in_kernel.iter().map(|psk| (SUBSYSTEM.to_owned(), psk.clone()));
    KEYS.1.lock().unwrap().extend(stored);
    assert_eq!(tls_psks("key=.nvme").unwrap(), in_kernel);
    assert_eq!(tls_psks("key=with-kernel,.nvme").unwrap(), in_kernel, "none is offered twice");
    let of_version_0 = tls_psks("key=.nvme&tls-identity=0").unwrap();
    assert!(of_version_0.iter().all(|psk| psk.version == IdentityVersion::Zero));
    assert_eq!(of_version_0.len(), 2);
    KEYS.1.lock().unwrap().retain(|(_, psk)| psk.version == IdentityVersion::Zero);
    let refused = tls_psks("key=.nvme&tls-identity=1").err().unwrap();
    assert!(refused.text.contains("none with an identity of version 1"), "{refused}");
}

#[test]
fn refused_secrets_are_looked_up_by_another_thread() {
    store_chap("refused-host", 1);
    let keys = keys_of(&security_of("dhchap=refused-host").unwrap()).unwrap();
    let options = keys.secure(&Options::new(NQN, HOST, [1; 16]));
    let authentication = options.authentication.unwrap();
    let lookup = authentication.lookup.clone().unwrap();
    store_chap("refused-host", 5);
    lookup.start();
    while lookup.is_in_progress() {
        tenmil_linux::named_thread::yield_cpu();
    }
    assert_eq!(authentication.secrets().host, chap_secret(5));
    // A key that cannot be read any more stays as it is.
    remove_key("refused-host");
    lookup.start();
    while lookup.is_in_progress() {
        tenmil_linux::named_thread::yield_cpu();
    }
    assert_eq!(authentication.secrets().host, chap_secret(5));
    drop(keys);
    assert!(!lookup.is_in_progress());
}

#[test]
fn replaced_keys_are_used_after_a_reload_and_kept_if_they_cannot_be_read() {
    store_chap("reload-host", 1);
    let keys = keys_of(&security_of("dhchap=reload-host").unwrap()).unwrap();
    let options = keys.secure(&Options::new(NQN, HOST, [1; 16]));
    let authentication = options.authentication.unwrap();
    store_chap("reload-host", 5);
    assert_eq!(authentication.secrets().host, chap_secret(1));
    let of_this = |errors: Vec<(String, Error)>| {
        errors.into_iter().any(|(_, error)| error.text.contains("reload-host"))
    };
    assert!(!of_this(reload_keys()));
    assert_eq!(authentication.secrets().host, chap_secret(5));
    KEYS.0.lock().unwrap().remove("reload-host");
    assert!(of_this(reload_keys()));
    assert_eq!(authentication.secrets().host, chap_secret(5));
    drop(keys);
    assert!(!of_this(reload_keys()), "a closed device needs no keys");
}

#[cfg(not(feature = "tls"))]
#[test]
fn program_without_tls_names_the_feature() {
    let refused = keys_of(&security_of("tls=required&key=a").unwrap()).err().unwrap();
    assert!(refused.text.ends_with(": this program has no TLS"), "{refused}");
    assert_eq!(refused.hint.as_deref(), Some("build it with the feature `tls`"));
}

#[test]
fn secrets_do_not_appear_in_debug_output() {
    store_chap("debug-host", 65);
    let security = security_of("dhchap=debug-host").unwrap();
    let keys = keys_of(&security).unwrap();
    let options = keys.secure(&Options::new(NQN, HOST, [1; 16]));
    let text = format!("{security:?} {options:?}");
    assert!(!text.contains("AAAA") && !text.contains("QUFB") && !text.contains("65, 65"), "{text}");
    assert!(text.contains("debug-host"), "the name");
}
