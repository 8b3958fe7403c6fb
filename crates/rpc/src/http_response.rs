//! Incremental parser of the responses that a client receives, and of a stream of server-sent events.

use serde_json::Value;

use crate::error::{ErrorCode, RpcError, quote_untrusted};
use crate::strict_json;

/// Parser of one response at a time.
#[derive(Debug, Default)]
pub(crate) struct ResponseParser {
    input: Vec<u8>,
    state: ParserState,
    head: Option<ResponseHead>,
    body: Vec<u8>,
}

/// What is parsed next.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum ParserState {
    /// Status line and headers.
    #[default]
    Head,
    /// This many bytes of the body.
    Sized(usize),
    /// Size of a chunk.
    ChunkSize,
    /// This many bytes of a chunk, and a line break.
    Chunk(usize),
    ChunkEnd,
    /// Lines after the last chunk, up to an empty one.
    Trailers,
    /// Everything up to the end of the stream.
    UntilEnd,
    /// The response is complete.
    Complete,
}

/// Status and headers of a response, as far as a client uses them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ResponseHead {
    pub(crate) status: u16,
    /// Whether the server closes the connection after the response.
    pub(crate) closes: bool,
}

/// Incremental parser of a stream of server-sent events.
#[derive(Debug, Default)]
pub(crate) struct EventStreamParser(Vec<u8>);

const HEADERS_MAX: usize = 64;
/// Longest head, chunk size or trailer.
const HEAD_LEN_MAX: usize = 64 << 10;
/// Longest body, or event, accepted from a server.
const BODY_LEN_MAX: usize = 64 << 20;

impl ResponseParser {
    /// Parses received bytes. After an error the stream cannot be parsed any further.
    pub(crate) fn receive(&mut self, bytes: &[u8]) -> Result<(), RpcError> {
        self.input.extend_from_slice(bytes);
        while self.step()? {}
        if self.body.len() > BODY_LEN_MAX {
            return Err(malformed_error(&format!("a body of more than {BODY_LEN_MAX} bytes")));
        }
        Ok(())
    }

    /// Handles the end of the stream. Returns whether the response is complete.
    pub(crate) fn handle_stream_end(&mut self) -> bool {
        if self.state == ParserState::UntilEnd {
            self.state = ParserState::Complete;
        }
        self.is_complete()
    }

    /// Head of the response, once it was received.
    pub(crate) fn head(&self) -> Option<&ResponseHead> {
        self.head.as_ref()
    }

    /// Whether the response was received in full.
    pub(crate) fn is_complete(&self) -> bool {
        self.state == ParserState::Complete
    }

    /// Removes the part of the body that was received.
    pub(crate) fn take_body(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.body)
    }

    /// Parses the next part. Returns false if more input is needed.
    fn step(&mut self) -> Result<bool, RpcError> {
        match self.state {
            ParserState::Head => self.parse_head(),
            ParserState::Sized(0) => {
                self.state = ParserState::Complete;
                Ok(true)
            }
            ParserState::Sized(left) => {
                let taken = self.take_input(left);
                self.state = ParserState::Sized(left - taken);
                Ok(taken > 0)
            }
            ParserState::ChunkSize => self.parse_chunk_size(),
            ParserState::Chunk(0) => {
                self.state = ParserState::ChunkEnd;
                Ok(true)
            }
            ParserState::Chunk(left) => {
                let taken = self.take_input(left);
                self.state = ParserState::Chunk(left - taken);
                Ok(taken > 0)
            }
            ParserState::ChunkEnd => match self.take_line()? {
                None => Ok(false),
                Some(line) if line.is_empty() => {
                    self.state = ParserState::ChunkSize;
                    Ok(true)
                }
                Some(line) => Err(malformed_error(&shown(&line))),
            },
            ParserState::Trailers => match self.take_line()? {
                None => Ok(false),
                Some(line) => {
                    if line.is_empty() {
                        self.state = ParserState::Complete;
                    }
                    Ok(true)
                }
            },
            ParserState::UntilEnd => Ok(self.take_input(usize::MAX) > 0),
            ParserState::Complete => Ok(false),
        }
    }

    fn parse_head(&mut self) -> Result<bool, RpcError> {
        let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
        let mut response = httparse::Response::new(&mut headers);
        let parsed = response
            .parse(&self.input)
            .map_err(|error| malformed_error(&format!("{error}: {}", shown(&self.input))))?;
        let httparse::Status::Complete(len) = parsed else {
            if self.input.len() > HEAD_LEN_MAX {
                return Err(malformed_error("a head that does not end"));
            }
            return Ok(false);
        };
        let status = response.code.unwrap_or_default();
        let (framing, closes) = parse_framing(status, response.headers)?;
        self.input.drain(..len);
        // Interim responses precede the response.
        if status >= 200 {
            self.head = Some(ResponseHead { status, closes });
            self.state = framing;
        }
        Ok(true)
    }

    fn parse_chunk_size(&mut self) -> Result<bool, RpcError> {
        let Some(line) = self.take_line()? else { return Ok(false) };
        let digits = line.split(|byte| matches!(byte, b';' | b' ')).next().unwrap_or_default();
        let size = std::str::from_utf8(digits).ok();
        let size = size.and_then(|digits| usize::from_str_radix(digits, 16).ok());
        match size {
            Some(0) => self.state = ParserState::Trailers,
            Some(size) if size <= BODY_LEN_MAX => self.state = ParserState::Chunk(size),
            _ => return Err(malformed_error(&format!("chunk size {}", shown(&line)))),
        }
        Ok(true)
    }

    /// Moves up to `len_max` bytes of input to the body, and returns their number.
    fn take_input(&mut self, len_max: usize) -> usize {
        let len = self.input.len().min(len_max);
        self.body.extend(self.input.drain(..len));
        len
    }

    /// Removes a line from the input, if it is complete, without its line break.
    fn take_line(&mut self) -> Result<Option<Vec<u8>>, RpcError> {
        let Some(end) = self.input.iter().position(|byte| *byte == b'\n') else {
            if self.input.len() > HEAD_LEN_MAX {
                return Err(malformed_error("a line that does not end"));
            }
            return Ok(None);
        };
        let mut line: Vec<u8> = self.input.drain(..=end).collect();
        line.pop();
        if line.last() == Some(&b'\r') {
            line.pop();
        }
        Ok(Some(line))
    }
}

/// How the body ends (RFC 9112, section 6.3), and whether the connection does too.
fn parse_framing(
    status: u16,
    headers: &[httparse::Header<'_>],
) -> Result<(ParserState, bool), RpcError> {
    let value = |name: &str| {
        let header = headers.iter().find(|header| header.name.eq_ignore_ascii_case(name));
        header.map(|header| String::from_utf8_lossy(header.value).trim().to_ascii_lowercase())
    };
    let closes = value("connection").is_some_and(|text| text.contains("close"));
    if status == 204 || status == 304 {
        return Ok((ParserState::Complete, closes));
    }
    match (value("transfer-encoding"), value("content-length")) {
        (Some(coding), None) if coding == "chunked" => Ok((ParserState::ChunkSize, closes)),
        (None, Some(len)) => match len.parse() {
            Ok(len) if len <= BODY_LEN_MAX => Ok((ParserState::Sized(len), closes)),
            _ => Err(malformed_error(&format!("content-length {}", quote_untrusted(&len)))),
        },
        (None, None) => Ok((ParserState::UntilEnd, true)),
        (Some(coding), _) => {
            Err(malformed_error(&format!("transfer-encoding {}", quote_untrusted(&coding))))
        }
    }
}

impl EventStreamParser {
    /// Parses received bytes, and appends the data of each event to `events`.
    pub(crate) fn receive(
        &mut self,
        bytes: &[u8],
        events: &mut impl Extend<Value>,
    ) -> Result<(), RpcError> {
        self.0.extend_from_slice(bytes);
        while let Some(end) = self.0.windows(2).position(|pair| pair == b"\n\n") {
            let block: Vec<u8> = self.0.drain(..end + 2).collect();
            // Lines of other fields and comments are skipped: the data name the kind too.
            let data =
                block.split(|byte| *byte == b'\n').find_map(|line| line.strip_prefix(b"data:"));
            let Some(data) = data else { continue };
            match strict_json::parse_json(data) {
                Ok(event @ Value::Object(_)) => events.extend([event]),
                _ => return Err(malformed_error(&format!("event {}", shown(data)))),
            }
        }
        if self.0.len() > BODY_LEN_MAX {
            return Err(malformed_error("an event that does not end"));
        }
        Ok(())
    }
}

fn shown(bytes: &[u8]) -> String {
    quote_untrusted(&String::from_utf8_lossy(&bytes[..bytes.len().min(200)]))
}

fn malformed_error(found: &str) -> RpcError {
    let message = format!("response: {found}, expected HTTP/1.1 with JSON");
    RpcError::remote(ErrorCode::NotJson, message)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use tenmil_base::ErrorCategory;

    use super::{EventStreamParser, ResponseHead, ResponseParser};

    const SIZED: &str = "HTTP/1.1 404 Not Found\r\nContent-Length: 5\r\nX: y\r\n\r\nabcde";
    const CHUNKED: &str = "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nconnection: close\r\n\
        transfer-encoding: chunked\r\n\r\n3;x=y\r\nabc\r\n2\r\nde\r\n0\r\nT: x\r\n\r\n";

    #[test]
    fn response_split_at_any_byte_is_the_same() {
        for (text, status, closes) in [(SIZED, 404, false), (CHUNKED, 200, true)] {
            let bytes = text.as_bytes();
            for cut in 0..=bytes.len() {
                let mut parser = ResponseParser::default();
                parser.receive(&bytes[..cut]).unwrap();
                assert_eq!(parser.is_complete(), cut == bytes.len());
                parser.receive(&bytes[cut..]).unwrap();
                assert!(parser.is_complete());
                assert_eq!(parser.head(), Some(&ResponseHead { status, closes }));
                assert_eq!(parser.take_body(), b"abcde", "cut at {cut}");
            }
        }
    }

    #[test]
    fn response_without_a_length_ends_with_the_stream() {
        let mut parser = ResponseParser::default();
        parser.receive(b"HTTP/1.0 200 OK\r\n\r\nabc").unwrap();
        assert!(!parser.is_complete() && parser.handle_stream_end());
        assert_eq!(parser.take_body(), b"abc");
        let mut cut = ResponseParser::default();
        cut.receive(&SIZED.as_bytes()[..SIZED.len() - 1]).unwrap();
        assert!(!cut.handle_stream_end());
    }

    #[test]
    fn malformed_response_is_a_remote_error() {
        let head = "HTTP/1.1 200 OK\r\n";
        for text in [
            "{}\n\n".to_owned(),
            "HTTP/2 200 OK\r\n\r\n".to_owned(),
            format!("{head}content-length: x\r\n\r\n"),
            format!("{head}content-length: 99999999999\r\n\r\n"),
            format!("{head}transfer-encoding: gzip\r\n\r\n"),
            format!("{head}transfer-encoding: chunked\r\ncontent-length: 1\r\n\r\n"),
            format!("{head}transfer-encoding: chunked\r\n\r\nx\r\n"),
            format!("{head}transfer-encoding: chunked\r\n\r\n1\r\nab\r\n"),
            format!("{head}transfer-encoding: chunked\r\n\r\nffffffffffffffff\r\n"),
            format!("{head}X: {}", "x".repeat(70_000)),
        ] {
            let refusal = ResponseParser::default().receive(text.as_bytes()).unwrap_err();
            assert_eq!(refusal.category, ErrorCategory::Remote, "{refusal}");
        }
    }

    #[test]
    fn events_split_at_any_byte_are_the_same_and_comments_are_skipped() {
        let text =
            ": hi\n\nevent: a\ndata: {\"kind\":\"a\"}\n\n: keep\n\ndata:{\"kind\":\"b\"}\n\n";
        for cut in 0..=text.len() {
            let (mut parser, mut events) = (EventStreamParser::default(), Vec::<Value>::new());
            parser.receive(&text.as_bytes()[..cut], &mut events).unwrap();
            parser.receive(&text.as_bytes()[cut..], &mut events).unwrap();
            assert_eq!(events, [json!({ "kind": "a" }), json!({ "kind": "b" })]);
        }
        let mut events = Vec::<Value>::new();
        assert!(EventStreamParser::default().receive(b"data: 1\n\n", &mut events).is_err());
    }
}
