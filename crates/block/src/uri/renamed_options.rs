//! Parameters of version 0.1 under their new names.

/// Scheme, old key, new key. An empty scheme stands for all.
const RENAMED: [(&str, &str, &str); 20] = [
    ("tcp", "detect", "keep-alive-timeout"),
    ("tcp", "connect", "connect-timeout"),
    ("tcp", "retry", "reconnect-delay"),
    ("tcp", "fail-fast", "fast-io-fail-timeout"),
    ("tcp", "give-up", "ctrl-loss-timeout"),
    ("tcp", "spread", "iopolicy"),
    ("tcp", "host", "hostnqn"),
    ("tcp", "cache", "write-cache"),
    ("tcp", "more", "msg-more"),
    ("tcp", "gather", "batch-send"),
    ("tcp", "direct", "inline-send"),
    ("tcp", "congestion", "congestion-control"),
    ("vfio-user", "patience", "command-timeout"),
    ("pcie", "patience", "command-timeout"),
    ("emu", "entries", "queue-size"),
    ("emu", "doorbell", "doorbell-cost"),
    ("volume", "cache", "metadata-cache"),
    ("socket", "congestion", "congestion-control"),
    ("dynamic", "rest", "migration-interval"),
    ("dynamic", "gather", "scheduling-core"),
];

/// Options of `serve --socket`, which are parsed as parameters of a URI.
const SOCKET: [(&str, &str); 2] = [("more", "msg-more"), ("gather", "batch-send")];

/// The present name of the parameter `key` of version 0.1, if it was renamed.
pub(super) fn renamed_key(scheme: &str, key: &str) -> Option<&'static str> {
    let of_scheme = RENAMED.iter().find(|(of, old, _)| *of == scheme && *old == key);
    let of_socket = SOCKET.iter().find(|(old, _)| scheme == "socket" && *old == key);
    of_scheme.map(|(_, _, new)| *new).or(of_socket.map(|(_, new)| *new))
}

#[cfg(test)]
mod tests {
    use crate::uri::Uri;

    #[test]
    fn renamed_parameter_is_rejected_with_its_new_name() {
        for (text, expected) in [
            ("tcp:x?detect=2s", "tcp:x?detect=2s: `detect` is now `keep-alive-timeout`"),
            ("emu:null?doorbell=1", "emu:null?doorbell=1: `doorbell` is now `doorbell-cost`"),
            ("dynamic:?gather=1", "dynamic:?gather=1: `gather` is now `scheduling-core`"),
        ] {
            let uri: Uri = text.parse().expect("a URI");
            let error =
                uri.options().reject_unconsumed().expect_err("an old parameter").to_string();
            assert_eq!(error, expected);
        }
    }

    #[test]
    fn parameter_of_another_scheme_is_unknown() {
        let uri: Uri = "ram:1m?detect=2s".parse().expect("a URI");
        let error =
            uri.options().reject_unconsumed().expect_err("an unknown parameter").to_string();
        assert!(error.starts_with("ram:1m?detect=2s: no parameter `detect`"), "{error}");
    }

    #[test]
    fn parameters_of_stacked_devices_get_their_new_names() {
        let old: Uri = "delay:[tcp:x?retry=1s]?read=1us".parse().expect("a URI");
        assert_eq!(
            old.with_renamed_keys().to_string(),
            "delay:[tcp:x?reconnect-delay=1s]?read=1us"
        );
    }
}
