/* Stands in for libnvjpeg on machines without a GPU: `decodes` in host memory and counts calls.
 *
 * Plane c of a picture is filled with 10 x the file's length modulo 10, plus c. A file whose last byte is 0xBA is
 * refused, with the whole batch, as by nvJPEG; its size is still found. One that ends in 0xEE fails for another reason.
 */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    unsigned char *channel[4];
    size_t pitch[4];
} Image;

typedef struct {
    int batch;
} State;

typedef struct {
    unsigned width, height;
} Stream;

enum { SUCCESS = 0, BAD_JPEG = 3, NOT_SUPPORTED = 4, ALLOCATOR_FAILURE = 5, ARCH_MISMATCH = 7 };

int pretended_engines = 1, pretended_batches = 0, pretended_prepared = 0, pretended_alive = 0;

int nvjpegGetProperty(int which, int *value) { *value = which + 13; return SUCCESS; }

int nvjpegCreateEx(int backend, void *device, void *pinned, unsigned flags, void **handle) {
    if (backend != 2 && !pretended_engines) return ARCH_MISMATCH;
    if (device || pinned || flags) return NOT_SUPPORTED;
    *handle = (void *)(size_t)(0x100 + backend);
    ++pretended_alive;
    return SUCCESS;
}
int nvjpegDestroy(void *handle) { --pretended_alive; return handle ? SUCCESS : NOT_SUPPORTED; }
int nvjpegJpegStateCreate(void *handle, State **state) {
    *state = calloc(1, sizeof(State));
    ++pretended_alive;
    return handle ? SUCCESS : NOT_SUPPORTED;
}
int nvjpegJpegStateDestroy(State *state) {
    free(state);
    --pretended_alive;
    return SUCCESS;
}
int nvjpegJpegStreamCreate(void *handle, Stream **stream) {
    *stream = calloc(1, sizeof(Stream));
    ++pretended_alive;
    return handle ? SUCCESS : NOT_SUPPORTED;
}
int nvjpegJpegStreamDestroy(Stream *stream) {
    free(stream);
    --pretended_alive;
    return SUCCESS;
}

int nvjpegJpegStreamParseHeader(void *handle, const unsigned char *data, size_t length, Stream *stream) {
    if (!handle || length < 4 || data[0] != 0xFF || data[1] != 0xD8) return BAD_JPEG;
    for (size_t at = 2; at + 9 < length && data[at] == 0xFF; at += 2 + (data[at + 2] << 8 | data[at + 3]))
        if (data[at + 1] == 0xC0) {
            stream->height = data[at + 5] << 8 | data[at + 6];
            stream->width = data[at + 7] << 8 | data[at + 8];
            return SUCCESS;
        }
    return BAD_JPEG;
}
int nvjpegJpegStreamGetFrameDimensions(Stream *stream, unsigned *width, unsigned *height) {
    *width = stream->width, *height = stream->height;
    return SUCCESS;
}
int nvjpegDecodeBatchedSupported(void *handle, Stream *stream, int *not_supported) {
    *not_supported = stream->width == 41; /* a width that these engines do not take */
    return handle ? SUCCESS : NOT_SUPPORTED;
}
int nvjpegDecodeBatchedInitialize(void *handle, State *state, int count, int threads, int format) {
    state->batch = count;
    ++pretended_prepared;
    return handle && threads == 1 && format == 3 ? SUCCESS : NOT_SUPPORTED;
}
int nvjpegDecodeBatched(void *handle, State *state, const unsigned char *const *data, const size_t *lengths,
                        Image *images, void *stream) {
    ++pretended_batches;
    if (!handle || !stream) return NOT_SUPPORTED;
    const int count = state->batch;
    for (int number = 0; number < count; ++number) {
        const unsigned char last = data[number][lengths[number] - 1];
        if (last == 0xBA) { state->batch = 0; return BAD_JPEG; }
        if (last == 0xEE) { state->batch = 0; return ALLOCATOR_FAILURE; }
    }
    if (count == 0) return 1;
    for (int number = 0; number < count; ++number) {
        const size_t length = images[number].channel[1] - images[number].channel[0];
        for (int plane = 0; plane < 3; ++plane)
            memset(images[number].channel[plane], 10 * (lengths[number] % 10) + plane, length);
    }
    return SUCCESS;
}
