//! Socket options: the keys of `tcp://` URIs, and the values of `serve --socket`. Each optimization
//! can be switched off, so that its effect can be measured.

use tenmil_block::quantity::parse_size;
use tenmil_block::uri::{Fields, Uri, UriError};
use tenmil_linux::socket::{SocketEngine, SocketOptions};
use tenmil_serve::tcp::PlacementPolicy;

use super::name::YES_OR_NO;
use tenmil_base::Error;

const ENGINES: [(&str, SocketEngine); 2] =
    [("epoll", SocketEngine::Epoll), ("io_uring", SocketEngine::Ring)];
const PLACEMENTS: [(&str, PlacementPolicy); 3] = [
    ("near", PlacementPolicy::Near),
    ("queue", PlacementPolicy::Queue),
    ("spread", PlacementPolicy::Spread),
];

/// Parses the socket options of a URI.
pub(super) fn of(uri: &Uri, fields: &mut Fields<'_>) -> Result<SocketOptions, UriError> {
    let mut options = SocketOptions::default();
    if let Some(gathers) = fields.choice("batch-send", &YES_OR_NO)? {
        options.gathers = gathers;
    }
    if let Some(says_more) = fields.choice("msg-more", &YES_OR_NO)? {
        options.says_more = says_more;
    }
    if let Some(text) = fields.text("zero-copy") {
        options.zero_copy_from_bytes = zero_copy(&text).map_err(|problem| uri.refuse(problem))?;
    }
    if let Some(busy) = fields.time("busy-poll")? {
        options.busy_poll = Some(busy);
    }
    options.congestion = fields.text("congestion-control");
    Ok(options)
}

fn zero_copy(text: &str) -> Result<Option<usize>, String> {
    if text == "no" {
        return Ok(None);
    }
    let bytes = parse_size(text).ok().and_then(|bytes| usize::try_from(bytes).ok());
    bytes.map(Some).ok_or_else(|| format!("zero-copy is `{text}`, expected a size or no"))
}

/// Parses the socket options of a server, given as `KEY=VALUE` words, and its connection placement
/// policy.
pub(crate) fn of_server(words: &[String]) -> Result<(SocketOptions, PlacementPolicy), Error> {
    let mut uri = Uri::new("socket", "");
    for word in words {
        let (key, value) = word.split_once('=').unwrap_or((word, ""));
        uri = uri.with(key, value);
    }
    let mut fields = uri.fields();
    let mut options = of(&uri, &mut fields)?;
    // Servers only: the host opens a connection in one thread and uses it in another, which an
    // io_uring instance does not allow.
    if let Some(engine) = fields.choice("engine", &ENGINES)? {
        options.engine = engine;
    }
    let placement = fields.choice("placement", &PLACEMENTS)?.unwrap_or_default();
    fields.finish()?;
    Ok((options, placement))
}

#[cfg(test)]
mod tests {
    use tenmil_linux::socket::{SocketEngine, SocketOptions};

    use tenmil_serve::tcp::PlacementPolicy;

    use super::of_server;

    fn words(words: &[&str]) -> Vec<String> {
        words.iter().map(|word| (*word).to_owned()).collect()
    }

    #[test]
    fn each_technique_of_a_servers_sockets_has_its_word() {
        let usual = (SocketOptions::default(), PlacementPolicy::Near);
        assert_eq!(of_server(&[]).unwrap(), usual);
        let all = words(&[
            "batch-send=no",
            "msg-more=no",
            "zero-copy=64k",
            "busy-poll=50us",
            "congestion-control=bbr",
        ]);
        let (options, _) = of_server(&all).unwrap();
        assert!(!options.gathers && !options.says_more);
        assert_eq!(options.zero_copy_from_bytes, Some(65_536));
        assert_eq!(options.busy_poll, Some(tenmil_base::Span::from_us(50)));
        assert_eq!(options.congestion.as_deref(), Some("bbr"));
        let ring = words(&["engine=io_uring", "zero-copy=no", "placement=spread"]);
        let (ring, placement) = of_server(&ring).unwrap();
        assert_eq!(placement, PlacementPolicy::Spread);
        assert_eq!((ring.engine, ring.zero_copy_from_bytes), (SocketEngine::Ring, None));
    }

    #[test]
    fn a_word_that_is_none_is_refused_with_those_that_are() {
        for (word, expected) in [
            ("batch-send=perhaps", "batch-send is `perhaps`, expected no or yes"),
            ("zero-copy=lots", "zero-copy is `lots`, expected a size or no"),
            ("nagle=yes", "no parameter `nagle`, expected batch-send, msg-more, zero-copy"),
            ("msg-more", "msg-more is ``, expected no or yes"),
        ] {
            let refused = of_server(&words(&[word])).unwrap_err();
            assert!(refused.text.contains(expected), "{}", refused.text);
        }
    }
}
