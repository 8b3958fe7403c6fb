//! Socket options: keys of `tcp://` URIs. Each optimization can be switched off, so that its effect can
//! be measured.

use tenmil_base::Error;
use tenmil_block::quantity_parser::parse_size;
use tenmil_block::uri::{Uri, UriError, UriOptions};
use tenmil_linux::socket::SocketOptions;

use super::tcp_uri::YES_OR_NO;

/// Parses the socket options of a URI.
///
/// # Errors
///
/// If a value is invalid.
pub fn socket_options(uri: &Uri, fields: &mut UriOptions<'_>) -> Result<SocketOptions, UriError> {
    let mut options = SocketOptions::default();
    if let Some(gathers) = fields.choice_value("batch-send", &YES_OR_NO)? {
        options.batch_send = gathers;
    }
    if let Some(says_more) = fields.choice_value("msg-more", &YES_OR_NO)? {
        options.msg_more = says_more;
    }
    if let Some(text) = fields.text_value("zero-copy") {
        options.zero_copy_from_bytes =
            parse_zero_copy_threshold(&text).map_err(|problem| uri.error(problem))?;
    }
    if let Some(busy) = fields.time_value("busy-poll")? {
        options.busy_poll = Some(busy);
    }
    options.congestion = fields.text_value("congestion-control");
    Ok(options)
}

fn parse_zero_copy_threshold(text: &str) -> Result<Option<usize>, Error> {
    if text == "no" {
        return Ok(None);
    }
    let bytes = parse_size(text).ok().and_then(|bytes| usize::try_from(bytes).ok());
    bytes
        .map(Some)
        .ok_or_else(|| format!("zero-copy is `{text}`, expected a size or no"))
        .map_err(Error::environment)
}
