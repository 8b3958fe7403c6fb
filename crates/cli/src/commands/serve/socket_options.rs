//! Values of `serve --socket`.

use tenmil_base::Error;
use tenmil_block::uri::Uri;
use tenmil_devices::tcp::socket_options;
use tenmil_linux::socket::{SocketEngine, SocketOptions};
use tenmil_serve::tcp::PlacementPolicy;

const ENGINES: [(&str, SocketEngine); 2] =
    [("epoll", SocketEngine::Epoll), ("io_uring", SocketEngine::IoUring)];
const PLACEMENTS: [(&str, PlacementPolicy); 3] = [
    ("near", PlacementPolicy::Near),
    ("queue", PlacementPolicy::Queue),
    ("spread", PlacementPolicy::Spread),
];

/// Parses the socket options of a server, given as `KEY=VALUE` words, and its connection placement
/// policy.
pub(super) fn parse_socket_options(
    words: &[String],
) -> Result<(SocketOptions, PlacementPolicy), Error> {
    let mut uri = Uri::new("socket", "");
    for word in words {
        let (key, value) = word.split_once('=').unwrap_or((word, ""));
        uri = uri.with_option(key, value);
    }
    let mut fields = uri.options();
    let mut options = socket_options(&uri, &mut fields)?;
    // Servers only: the host opens a connection in one thread and uses it in another, which an
    // io_uring instance does not allow.
    if let Some(engine) = fields.choice_value("engine", &ENGINES)? {
        options.engine = engine;
    }
    let placement = fields.choice_value("placement", &PLACEMENTS)?.unwrap_or_default();
    fields.reject_unconsumed()?;
    Ok((options, placement))
}

#[cfg(test)]
mod tests {
    use tenmil_linux::socket::{SocketEngine, SocketOptions};

    use tenmil_serve::tcp::PlacementPolicy;

    use super::parse_socket_options;

    fn strings_of(words: &[&str]) -> Vec<String> {
        words.iter().map(|word| (*word).to_owned()).collect()
    }

    #[test]
    fn each_socket_option_has_its_word() {
        let usual = (SocketOptions::default(), PlacementPolicy::Near);
        assert_eq!(parse_socket_options(&[]).unwrap(), usual);
        let all = strings_of(&[
            "batch-send=no",
            "msg-more=no",
            "zero-copy=64k",
            "busy-poll=50us",
            "congestion-control=bbr",
        ]);
        let (options, _) = parse_socket_options(&all).unwrap();
        assert!(!options.batch_send && !options.msg_more);
        assert_eq!(options.zero_copy_from_bytes, Some(65_536));
        assert_eq!(options.busy_poll, Some(tenmil_base::Span::from_us(50)));
        assert_eq!(options.congestion.as_deref(), Some("bbr"));
        let ring = strings_of(&["engine=io_uring", "zero-copy=no", "placement=spread"]);
        let (ring, placement) = parse_socket_options(&ring).unwrap();
        assert_eq!(placement, PlacementPolicy::Spread);
        assert_eq!((ring.engine, ring.zero_copy_from_bytes), (SocketEngine::IoUring, None));
    }

    #[test]
    fn unknown_socket_option_is_rejected_with_the_known_ones() {
        for (word, expected) in [
            ("batch-send=perhaps", "batch-send is `perhaps`, expected no or yes"),
            ("zero-copy=lots", "zero-copy is `lots`, expected a size or no"),
            ("nagle=yes", "no parameter `nagle`, expected batch-send, msg-more, zero-copy"),
            ("msg-more", "msg-more is ``, expected no or yes"),
        ] {
            let refused = parse_socket_options(&strings_of(&[word])).unwrap_err();
            assert!(refused.text.contains(expected), "{}", refused.text);
        }
    }
}
